//! `wholemem put` and `get`: copies files or stdin to objects of a store, and objects to files or stdout.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::fd::AsFd;
use std::path::Path;

use anyhow::{Context, Result, anyhow, ensure};
use serde::Serialize;
use wholemem::files::{npy, safetensors};
use wholemem_command::progress::ProgressDisplay;
use wholemem_command::size::RoundedSize;
use wholemem_command::terminal::{self, StdoutClosed};
use wholemem_os::SharedSlice;
use wholemem_os::pidfd::Signal;
use wholemem_os::replace::Replacement;
use wholemem_os::signal::Signals;
use wholemem_store::{Client, Entry, Error, Object, Pack, Sealed};

use super::tensors;
use crate::cli::{FileFormat, GetArgs, PutArgs};

/// The number of bytes of a file or object that are copied at a time.
const COPY_LEN: usize = 1 << 20;

#[derive(Debug, Serialize)]
struct TransferReport<'a> {
    name: &'a str,
    id: u64,
    version: u64,
    len: usize,
    objects: usize,
}

/// Returns the format of a file: the given one, or that of the file's extension.
fn format_of(path: &Path, given: Option<FileFormat>) -> FileFormat {
    given.unwrap_or_else(|| match path.extension().and_then(|extension| extension.to_str()) {
        Some("npy") => FileFormat::Npy,
        Some("safetensors") => FileFormat::Safetensors,
        _ => FileFormat::Bytes,
    })
}

/// Returns true if a path stands for stdin or stdout.
fn is_standard(path: &Path) -> bool {
    path.as_os_str() == "-"
}

pub(crate) fn put(args: &PutArgs) -> Result<()> {
    let path = &args.file;
    let wait = std::time::Duration::from_secs_f64(args.wait);
    let client = super::connect(&args.socket)?.waiting_for_space(wait);
    let shown = if is_standard(path) { "stdin".to_owned() } else { path.display().to_string() };
    let opened = if is_standard(path) { open_stdin() } else { open_regular(path) };
    let put = opened.and_then(|file| put_file(&client, &args.name, file, format_of(path, args.format)));
    let (sealed, len, objects) = put.with_context(|| format!("cannot put {shown}"))?;
    let Sealed { id, version, .. } = sealed;
    if args.json {
        let report = TransferReport { name: &args.name, id: id.as_u64(), version, len, objects };
        return terminal::print_json(&report);
    }
    let count = if objects == 1 { String::new() } else { format!(", {objects} objects") };
    let name = terminal::escaped(&args.name);
    terminal::print(&format!("{name} version {version}, {}{count}\n", RoundedSize(len)))
}

fn open_regular(path: &Path) -> Result<File> {
    // The file type is checked before `open`, which would block on a FIFO without a writer.
    let is_regular = std::fs::metadata(path)?.is_file();
    ensure!(is_regular, "not a regular file: its length is not known in advance; `-` reads stdin");
    Ok(File::open(path)?)
}

/// Returns stdin if it is a regular file that was not read yet; else reads all of stdin into memory, because the length of an
/// object must be known when it is created.
fn open_stdin() -> Result<File> {
    let mut input = File::from(std::io::stdin().as_fd().try_clone_to_owned()?);
    if input.metadata()?.is_file() && input.stream_position()? == 0 {
        return Ok(input);
    }
    let memory = rustix::fs::memfd_create("wholemem-put", rustix::fs::MemfdFlags::CLOEXEC)?;
    let mut memory = File::from(memory);
    let progress = ProgressDisplay::unbounded("reading stdin");
    let mut buffer = vec![0; COPY_LEN];
    loop {
        match input.read(&mut buffer) {
            Ok(0) => break,
            Ok(len) => {
                memory.write_all(&buffer[..len])?;
                progress.advance(len);
            }
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
    memory.rewind()?;
    Ok(memory)
}

fn put_file(
    client: &Client,
    name: &str,
    mut file: File,
    format: FileFormat,
) -> Result<(Sealed, usize, usize)> {
    let len = usize::try_from(file.metadata()?.len())?;
    match format {
        FileFormat::Safetensors => put_safetensors(client, name, &mut file, len),
        FileFormat::Npy => {
            let mut start = vec![0; len.min(npy::MAX_HEADER_LEN)];
            file.read_exact(&mut start)?;
            let (offset, meta) = tensors::read_npy(&start, len as u64)?;
            put_bytes(client, name, meta.as_bytes(), &mut file, offset, len - offset)
        }
        FileFormat::Bytes => put_bytes(client, name, &[], &mut file, 0, len),
    }
}

fn put_bytes(
    client: &Client,
    name: &str,
    meta: &[u8],
    file: &mut File,
    offset: usize,
    len: usize,
) -> Result<(Sealed, usize, usize)> {
    let mut draft = client.create_with_meta(name, meta, len)?;
    let progress = ProgressDisplay::bytes("putting", len);
    copy_in(file, offset, len, &progress, |at, bytes| Ok(draft.write_at(at, bytes)?))?;
    let stat_len = offset + len;
    ensure!(file.read(&mut [0])? == 0, "the file is longer than the {stat_len} bytes that stat reports");
    Ok((draft.seal().map_err(Error::from)?, len, 1))
}

/// Puts a .safetensors file into a store as a pack with an object `NAME/TENSOR` for each tensor.
fn put_safetensors(
    client: &Client,
    name: &str,
    file: &mut File,
    len: usize,
) -> Result<(Sealed, usize, usize)> {
    let mut start = [0; 8];
    ensure!(
        len >= start.len(),
        "not a .safetensors file: it is shorter than the 8 bytes with the length of its header"
    );
    file.read_exact(&mut start)?;
    let mut header = vec![0; safetensors::header_len(start, len as u64)?];
    file.read_exact(&mut header)?;
    let entries = safetensors::decode(&header, len as u64)?;
    let description = tensors::pack_description(safetensors::metadata(&header).as_deref());
    let mut pack = Pack::new(name).with_meta(description.as_bytes());
    let mut ranges = Vec::new();
    for tensor in &entries {
        let (offset, len) = (usize::try_from(tensor.offset)?, usize::try_from(tensor.len)?);
        let meta = tensors::description(tensor);
        pack = pack.add_with_meta(&format!("{name}/{}", tensor.name), meta.as_bytes(), len);
        ranges.push((offset, len));
    }
    let mut draft = client.create_pack(&pack)?;
    let total = ranges.iter().map(|(_, len)| len).sum();
    let progress = ProgressDisplay::bytes("putting", total);
    for (member, (offset, len)) in ranges.into_iter().enumerate() {
        copy_in(file, offset, len, &progress, |at, bytes| Ok(draft.write_at(member, at, bytes)?))?;
    }
    Ok((draft.seal().map_err(Error::from)?, total, entries.len()))
}

fn copy_in(
    file: &mut File,
    offset: usize,
    len: usize,
    progress: &ProgressDisplay,
    mut write: impl FnMut(usize, &[u8]) -> Result<()>,
) -> Result<()> {
    let mut buffer = vec![0; COPY_LEN.min(len)];
    file.seek(SeekFrom::Start(offset as u64))?;
    for at in (0..len).step_by(COPY_LEN) {
        let part = &mut buffer[..COPY_LEN.min(len - at)];
        file.read_exact(part).context("the file was truncated while it was read")?;
        write(at, part)?;
        progress.advance(part.len());
    }
    Ok(())
}

pub(crate) fn get(args: &GetArgs) -> Result<()> {
    let client = super::connect(&args.socket)?;
    let deadline = wholemem_os::Deadline::after(std::time::Duration::from_secs_f64(args.wait));
    let object = client.get_within(&args.name, deadline)?;
    // The object's properties are read while the object is held: after the file is written, another object may have the name.
    let entry = object.entry()?;
    let is_stdout = is_standard(&args.file);
    let shown = if is_stdout { "stdout".to_owned() } else { args.file.display().to_string() };
    let format = format_of(&args.file, args.format);
    let open = || if is_stdout { Ok(OutputFile::stdout()) } else { OutputFile::create(&args.file) };
    let (len, objects) = match format {
        FileFormat::Safetensors => get_safetensors(object, &entry, open),
        format => get_bytes(&object, &entry, format == FileFormat::Npy, open),
    }
    .with_context(|| format!("cannot write {shown}"))?;
    let (id, version) = (entry.id.as_u64(), entry.version);
    let report = TransferReport { name: &args.name, id, version, len, objects };
    let line = match args.json {
        true => serde_json::to_string(&report)? + "\n",
        false => format!("{} version {version}, {}\n", terminal::escaped(&args.name), RoundedSize(len)),
    };
    if is_stdout {
        // The bytes of the object are on stdout.
        terminal::print_stderr(&line);
        return Ok(());
    }
    terminal::print(&line)
}

/// Returns the error that an object cannot be written as a .npy or .safetensors file, because it was not put as one.
fn not_put_as(entry: &Entry, kind: &str) -> anyhow::Error {
    let name = terminal::escaped(&entry.name);
    anyhow!(
        "`{name}` was not put as a {kind} file; with `--format bytes` its bytes are written without a header"
    )
}

fn get_bytes(
    object: &Object,
    entry: &Entry,
    is_npy: bool,
    open: impl FnOnce() -> Result<OutputFile>,
) -> Result<(usize, usize)> {
    let front = match is_npy {
        true => tensors::write_npy(&entry.meta).ok_or_else(|| not_put_as(entry, ".npy"))?,
        false => Vec::new(),
    };
    let bytes = object.bytes()?;
    let mut file = open()?;
    file.write(&front)?;
    copy_out(&bytes, &mut file, &ProgressDisplay::bytes("getting", object.len()))?;
    file.commit()?;
    Ok((object.len(), 1))
}

fn get_safetensors(
    object: Object,
    entry: &Entry,
    open: impl FnOnce() -> Result<OutputFile>,
) -> Result<(usize, usize)> {
    let metadata =
        tensors::parse_pack_description(&entry.meta).ok_or_else(|| not_put_as(entry, ".safetensors"))?;
    let pack = object.into_pack()?;
    let prefix = format!("{}/", entry.name);
    let mut found = Vec::new();
    for (full, member) in pack.members() {
        let name = full.strip_prefix(&prefix).unwrap_or(full);
        found.push((full, member, tensors::parse_description(name, &member.meta, member.len)?));
    }
    found.sort_by_key(|(_, member, _)| member.offset);
    let entries: Vec<_> = found.iter().map(|(_, _, entry)| entry.clone()).collect();
    let total = found.iter().map(|(_, member, _)| member.len).sum();
    let mut file = open()?;
    file.write(&safetensors::encode_header(&entries, metadata)?)?;
    let progress = ProgressDisplay::bytes("getting", total);
    for (full, _, _) in &found {
        copy_out(&pack.bytes(full)?, &mut file, &progress)?;
    }
    file.commit()?;
    Ok((total, found.len()))
}

fn copy_out(bytes: &SharedSlice<'_>, file: &mut OutputFile, progress: &ProgressDisplay) -> Result<()> {
    let mut buffer = vec![0; COPY_LEN.min(bytes.len())];
    for at in (0..bytes.len()).step_by(COPY_LEN) {
        let part = &mut buffer[..COPY_LEN.min(bytes.len() - at)];
        bytes.read_at(at, part)?;
        file.write(part)?;
        progress.advance(part.len());
    }
    Ok(())
}

/// The output of `wholemem get`. An existing file is replaced atomically when all bytes are written.
enum OutputFile {
    Stdout,
    File {
        file: Replacement,
        /// Blocks signals while a temporary file exists, so that the file is removed before the process ends. `None` if the output
        /// is not a regular file.
        signals: Option<Signals>,
    },
}

impl OutputFile {
    fn stdout() -> Self {
        Self::Stdout
    }

    fn create(path: &Path) -> Result<Self> {
        // If the output is a FIFO, signals are not blocked, because they must interrupt an `open` that waits for a reader.
        let is_file = std::fs::metadata(path).map_or(true, |found| found.is_file());
        // If a file exceeds RLIMIT_FSIZE, SIGXFSZ would kill this process. If the signal is blocked, the write fails with EFBIG
        // instead.
        let blocked = [Signal::INT, Signal::TERM, Signal::HUP, Signal::XFSZ];
        let signals = is_file.then(|| Signals::block(&blocked)).transpose()?;
        Ok(Self::File { file: Replacement::create(path)?, signals })
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        // The error is converted to text without its source, so that ENOSPC of a full disk is not classified as out of memory.
        match self {
            Self::Stdout => match std::io::stdout().lock().write_all(bytes) {
                Err(error) if error.kind() == std::io::ErrorKind::BrokenPipe => Err(StdoutClosed.into()),
                outcome => outcome.map_err(|error| anyhow!("{error}")),
            },
            Self::File { file, .. } => {
                file.write_all(bytes).map_err(|error| anyhow!("{error}"))?;
                self.check()
            }
        }
    }

    /// Returns an error if a blocked signal, such as SIGINT, is pending.
    fn check(&self) -> Result<()> {
        let Self::File { signals, .. } = self else { return Ok(()) };
        let signal = signals.as_ref().map(Signals::next).transpose()?.flatten();
        ensure!(signal.is_none(), "interrupted by a signal before the output file was complete");
        Ok(())
    }

    fn commit(self) -> Result<()> {
        self.check()?;
        match self {
            Self::Stdout => std::io::stdout().flush().map_err(|error| anyhow!("{error}")),
            Self::File { file, .. } => file.commit().map_err(|error| anyhow!("{error}")),
        }
    }
}
