//! `wholemem table`: tables of rows as files, without ranks.

use std::ops::ControlFlow;

use anyhow::Result;
use serde::Serialize;
use wholemem::files::{CopyProgress, FileError, FileSource, SaveSpec, StoredTensor};
use wholemem_command::progress::Progress;
use wholemem_command::size::Rough;
use wholemem_command::terminal;
use wholemem_os::pidfd::Signal;
use wholemem_os::signal::Signals;

use crate::cli::{TableArgs, TableCommand, TableSource};

/// What there is to say of a table.
#[derive(Debug, Serialize)]
struct Told {
    path: String,
    dtype: String,
    shape: Vec<u64>,
    bytes: u64,
    files: usize,
    /// Whether rows have checksums.
    checksums: bool,
    /// What was done, and came out well.
    #[serde(skip_serializing_if = "Option::is_none")]
    done: Option<&'static str>,
}

pub(crate) fn run(args: &TableArgs) -> Result<()> {
    match &args.what {
        TableCommand::Info(source) => tell(source, &open(source)?, None),
        TableCommand::Check(source) => {
            let stored = open(source)?;
            watched("check", |watch| stored.verify(watch))?;
            let read = if stored.is_checked() { "checked" } else { "read; it has no checksums" };
            tell(source, &stored, Some(read))
        }
        TableCommand::Import(import) => {
            let stored = open(&import.source)?;
            let spec = SaveSpec { overwrite: import.overwrite };
            watched("import", |watch| stored.save(&import.to, import.parts, spec, watch))?;
            let saved =
                TableSource { path: import.to.clone(), json: import.source.json, ..TableSource::default() };
            tell(&saved, &open(&saved)?, Some("saved"))
        }
        TableCommand::Export(export) => {
            let stored = open(&export.source)?;
            watched("export", |watch| stored.export_npy(&export.to, watch))?;
            let written =
                TableSource { path: export.to.clone(), json: export.source.json, ..TableSource::default() };
            // It is what was read, whatever its name ends in, but for the files.
            let told = Told { files: 1, checksums: false, ..Told::of(&written, &stored, Some("written")) };
            print(&told, written.json)
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

/// Runs something long: with a bar, and to an early but orderly end when a signal comes.
fn watched(
    label: &str,
    work: impl FnOnce(wholemem::files::ProgressCallback<'_>) -> wholemem::Result<()>,
) -> Result<()> {
    // Before there is another thread, so that whoever is interrupted clears up; and not while there is nothing to clear up.
    let signals = Signals::block(&[Signal::INT, Signal::TERM, Signal::HUP])?;
    let bar = Progress::of_bytes(label, 0);
    work(&|CopyProgress { done, total }| {
        bar.set(done, total);
        if matches!(signals.next(), Ok(Some(_))) { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
    })?;
    Ok(())
}

impl Told {
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

fn tell(source: &TableSource, stored: &StoredTensor, done: Option<&'static str>) -> Result<()> {
    print(&Told::of(source, stored, done), source.json)
}

fn print(told: &Told, json: bool) -> Result<()> {
    if json {
        return terminal::print_json(told);
    }
    let shape: Vec<_> = told.shape.iter().map(ToString::to_string).collect();
    let size = usize::try_from(told.bytes)
        .map_or_else(|_| format!("{} B", told.bytes), |len| Rough(len).to_string());
    let files = if told.files == 1 { "1 file".to_owned() } else { format!("{} files", told.files) };
    let checksums = if told.checksums { ", with checksums" } else { "" };
    let done = told.done.map(|done| format!(": {done}")).unwrap_or_default();
    terminal::print(&format!(
        "{}{done}\n{} rows of {}, shape {}, {size} in {files}{checksums}\n",
        terminal::plain(&told.path),
        told.shape[0],
        told.dtype,
        shape.join(" x "),
    ))
}
