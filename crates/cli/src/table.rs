//! `wholemem table`: describes, imports, checks and exports table files in one process, without ranks.

use std::ops::ControlFlow;

use anyhow::Result;
use serde::Serialize;
use wholemem::files::{CopyProgress, FileError, FileSource, SaveSpec, StoredTensor};
use wholemem_command::progress::ProgressDisplay;
use wholemem_command::size::RoundedSize;
use wholemem_command::terminal;
use wholemem_os::pidfd::Signal;
use wholemem_os::signal::Signals;

use crate::cli::{TableArgs, TableCommand, TableSource};

/// The description of a table file, which is printed as text or JSON.
#[derive(Debug, Serialize)]
struct TableSummary {
    path: String,
    dtype: String,
    shape: Vec<u64>,
    bytes: u64,
    files: usize,
    /// True if the table file has checksums of its rows.
    checksums: bool,
    /// The operation on the table file that has succeeded, such as `saved`.
    #[serde(skip_serializing_if = "Option::is_none")]
    done: Option<&'static str>,
}

pub(crate) fn run(args: &TableArgs) -> Result<()> {
    match &args.command {
        TableCommand::Info(source) => print_summary(source, &open(source)?, None),
        TableCommand::Check(source) => {
            let stored = open(source)?;
            with_progress("check", |progress| stored.verify(progress))?;
            let done = if stored.is_checked() { "checked" } else { "read; it has no checksums" };
            print_summary(source, &stored, Some(done))
        }
        TableCommand::Import(import) => {
            let stored = open(&import.source)?;
            let spec = SaveSpec { overwrite: import.overwrite };
            with_progress("import", |progress| stored.save(&import.to, import.parts, spec, progress))?;
            let saved =
                TableSource { path: import.to.clone(), json: import.source.json, ..TableSource::default() };
            print_summary(&saved, &open(&saved)?, Some("saved"))
        }
        TableCommand::Export(export) => {
            let stored = open(&export.source)?;
            with_progress("export", |progress| stored.export_npy(&export.to, progress))?;
            let written =
                TableSource { path: export.to.clone(), json: export.source.json, ..TableSource::default() };
            // The exported file is not opened again to describe it, because its extension may not be `.npy`.
            let summary = TableSummary {
                files: 1,
                checksums: false,
                ..TableSummary::of(&written, &stored, Some("written"))
            };
            print(&summary, written.json)
        }
    }
}

fn open(source: &TableSource) -> Result<StoredTensor, wholemem::Error> {
    let TableSource { path, tensor, dtype, row_shape, .. } = source;
    let source = match (tensor, dtype) {
        (Some(name), _) => FileSource::tensor(path, name),
        (None, Some(dtype)) => FileSource::raw(path, *dtype, row_shape),
        (None, None) => FileSource::new(path),
    };
    StoredTensor::open(&source).map_err(|error: FileError| error.into())
}

/// Runs a long operation on files with a progress bar. If SIGINT, SIGTERM or SIGHUP arrives, the operation is aborted and
/// removes its temporary files.
fn with_progress(
    label: &str,
    work: impl FnOnce(wholemem::files::ProgressCallback<'_>) -> wholemem::Result<()>,
) -> Result<()> {
    // Signals are blocked before another thread exists, so that no signal kills the process while temporary files exist.
    let signals = Signals::block(&[Signal::INT, Signal::TERM, Signal::HUP])?;
    let bar = ProgressDisplay::bytes(label, 0);
    work(&|CopyProgress { done, total }| {
        bar.set(done, total);
        if matches!(signals.next(), Ok(Some(_))) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })?;
    Ok(())
}

impl TableSummary {
    fn of(source: &TableSource, stored: &StoredTensor, done: Option<&'static str>) -> Self {
        Self {
            path: source.path.display().to_string(),
            dtype: stored.dtype().to_string(),
            shape: stored.shape().to_vec(),
            bytes: stored.shape()[0] * stored.row_len(),
            files: stored.files(),
            checksums: stored.is_checked(),
            done,
        }
    }
}

fn print_summary(source: &TableSource, stored: &StoredTensor, done: Option<&'static str>) -> Result<()> {
    print(&TableSummary::of(source, stored, done), source.json)
}

fn print(summary: &TableSummary, json: bool) -> Result<()> {
    if json {
        return terminal::print_json(summary);
    }
    let shape: Vec<_> = summary.shape.iter().map(ToString::to_string).collect();
    let size = usize::try_from(summary.bytes)
        .map_or_else(|_| format!("{} B", summary.bytes), |len| RoundedSize(len).to_string());
    let files = if summary.files == 1 { "1 file".to_owned() } else { format!("{} files", summary.files) };
    let checksums = if summary.checksums { ", with checksums" } else { "" };
    let done = summary.done.map(|done| format!(": {done}")).unwrap_or_default();
    terminal::print(&format!(
        "{}{done}\n{} rows of {}, shape {}, {size} in {files}{checksums}\n",
        terminal::escaped(&summary.path),
        summary.shape[0],
        summary.dtype,
        shape.join(" x "),
    ))
}
