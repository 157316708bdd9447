//! Files into objects, and objects into files.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::Path;

use anyhow::{Context, Result};
use serde::Serialize;
use wholemem::files::safetensors;
use wholemem_os::SharedSlice;
use wholemem_store::{Client, Pack, Sealed};

use super::tensors;
use crate::cli::{GetArgs, PutArgs};
use crate::progress::Progress;
use crate::size::Rough;
use crate::terminal;

/// How much is copied at a time.
const STEP: usize = 1 << 20;

#[derive(Debug, Serialize)]
struct Report<'a> {
    name: &'a str,
    id: u64,
    version: u64,
    len: usize,
    objects: usize,
}

fn extension(path: &Path) -> &str {
    path.extension().and_then(|extension| extension.to_str()).unwrap_or_default()
}

pub(crate) fn put(args: &PutArgs) -> Result<()> {
    let path = &args.file;
    let wait = std::time::Duration::from_secs_f64(args.wait);
    let client = super::connect(&args.socket)?.waiting_for_room(wait);
    let context = || format!("cannot put {}", path.display());
    let mut file = File::open(path).with_context(context)?;
    let len = usize::try_from(file.metadata().with_context(context)?.len())?;
    let (sealed, len, objects) = match extension(path) {
        "safetensors" => put_safetensors(&client, &args.name, &mut file, len).with_context(context)?,
        "npy" => {
            let mut start = vec![0; len.min(STEP)];
            file.read_exact(&mut start).with_context(context)?;
            let (offset, meta) = tensors::read_npy(&start).with_context(context)?;
            put_bytes(&client, &args.name, meta.as_bytes(), &mut file, offset, len - offset)?
        }
        _ => put_bytes(&client, &args.name, &[], &mut file, 0, len)?,
    };
    let Sealed { id, version, .. } = sealed;
    if args.json {
        let report = Report { name: &args.name, id: id.as_u64(), version, len, objects };
        return terminal::print_json(&report);
    }
    let count = if objects == 1 { String::new() } else { format!(", {objects} objects") };
    terminal::print(&format!("{} version {version}, {}{count}\n", args.name, Rough(len)))
}

fn put_bytes(
    client: &Client,
    name: &str,
    meta: &[u8],
    file: &mut File,
    offset: usize,
    len: usize,
) -> Result<(Sealed, usize, usize)> {
    let mut draft = client.create_described(name, meta, len)?;
    let progress = Progress::of_bytes("putting", len);
    copy_in(file, offset, len, &progress, |at, bytes| Ok(draft.write_at(at, bytes)?))?;
    Ok((draft.seal()?, len, 1))
}

/// A pack with an object for each tensor, named behind the name of the pack.
fn put_safetensors(
    client: &Client,
    name: &str,
    file: &mut File,
    len: usize,
) -> Result<(Sealed, usize, usize)> {
    let mut start = [0; 8];
    file.read_exact(&mut start)?;
    let mut header = vec![0; safetensors::header_len(start, len as u64)?];
    file.read_exact(&mut header)?;
    let found = safetensors::decode(&header, len as u64)?;
    let mut pack = Pack::new(name).described(b"safetensors");
    let mut places = Vec::new();
    for tensor in &found {
        let (offset, len) = (usize::try_from(tensor.offset)?, usize::try_from(tensor.len)?);
        let meta = tensors::describe(tensor);
        pack = pack.add_described(&format!("{name}/{}", tensor.name), meta.as_bytes(), len);
        places.push((offset, len));
    }
    let mut draft = client.create_pack(&pack)?;
    let total = places.iter().map(|(_, len)| len).sum();
    let progress = Progress::of_bytes("putting", total);
    for (member, (offset, len)) in places.into_iter().enumerate() {
        copy_in(file, offset, len, &progress, |at, bytes| Ok(draft.write_at(member, at, bytes)?))?;
    }
    Ok((draft.seal()?, total, found.len()))
}

fn copy_in(
    file: &mut File,
    offset: usize,
    len: usize,
    progress: &Progress,
    mut write: impl FnMut(usize, &[u8]) -> Result<()>,
) -> Result<()> {
    let mut buffer = vec![0; STEP.min(len)];
    file.seek(SeekFrom::Start(offset as u64))?;
    for at in (0..len).step_by(STEP) {
        let part = &mut buffer[..STEP.min(len - at)];
        file.read_exact(part)?;
        write(at, part)?;
        progress.advance(part.len());
    }
    Ok(())
}

pub(crate) fn get(args: &GetArgs) -> Result<()> {
    let client = super::connect(&args.socket)?;
    let deadline = wholemem_os::Deadline::after(std::time::Duration::from_secs_f64(args.wait));
    let object = client.get_within(&args.name, deadline)?;
    let context = || format!("cannot write {}", args.file.display());
    let (len, objects) = if extension(&args.file) == "safetensors" {
        drop(object);
        get_safetensors(&client, &args.name, &args.file).with_context(context)?
    } else {
        let meta = object.entry()?.meta;
        let start = if extension(&args.file) == "npy" { tensors::write_npy(&meta) } else { None };
        let bytes = object.bytes()?;
        let mut file = File::create(&args.file).with_context(context)?;
        file.write_all(&start.unwrap_or_default()).with_context(context)?;
        let progress = Progress::of_bytes("getting", object.len());
        copy_out(&bytes, &mut file, &progress).with_context(context)?;
        (object.len(), 1)
    };
    let entry = client.stat(&args.name)?;
    if args.json {
        let (id, version) = (entry.id.as_u64(), entry.version);
        return terminal::print_json(&Report { name: &args.name, id, version, len, objects });
    }
    terminal::print(&format!("{} version {}, {}\n", args.name, entry.version, Rough(len)))
}

fn get_safetensors(client: &Client, name: &str, path: &Path) -> Result<(usize, usize)> {
    let pack = client.get_pack(name)?;
    let own = format!("{name}/");
    let mut found = Vec::new();
    for (full, member) in pack.members() {
        let name = full.strip_prefix(&own).unwrap_or(full);
        found.push((full, member, tensors::understand(name, &member.meta, member.len)?));
    }
    found.sort_by_key(|(_, member, _)| member.offset);
    let entries: Vec<_> = found.iter().map(|(_, _, entry)| entry.clone()).collect();
    let total = found.iter().map(|(_, member, _)| member.len).sum();
    let mut file = File::create(path)?;
    file.write_all(&safetensors::front(&entries)?)?;
    let progress = Progress::of_bytes("getting", total);
    for (full, _, _) in &found {
        copy_out(&pack.bytes(full)?, &mut file, &progress)?;
    }
    Ok((total, found.len()))
}

fn copy_out(bytes: &SharedSlice<'_>, file: &mut File, progress: &Progress) -> Result<()> {
    let mut buffer = vec![0; STEP.min(bytes.len())];
    for at in (0..bytes.len()).step_by(STEP) {
        let part = &mut buffer[..STEP.min(bytes.len() - at)];
        bytes.read_at(at, part)?;
        file.write_all(part)?;
        progress.advance(part.len());
    }
    Ok(())
}
