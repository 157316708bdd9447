//! `wholemem rm`: deletes objects of a store, and reports each.

use anyhow::{Error, Result};
use serde::Serialize;
use wholemem_command::failure::{self, Reported};
use wholemem_command::size::RoundedSize;
use wholemem_command::terminal;
use wholemem_store::{Client, Entry, ObjectId};

use super::pattern;
use super::summary::count;
use crate::cli::RemoveArgs;

/// An object that was deleted.
#[derive(Debug, Serialize)]
struct RemovedObject {
    name: String,
    id: u64,
    version: u64,
    len: usize,
    /// The number of objects of a pack that were deleted with it.
    objects: usize,
}

#[derive(Debug, Default, Serialize)]
struct RemoveReport {
    removed: Vec<RemovedObject>,
    failed: Vec<failure::ErrorReport>,
}

pub(crate) fn remove(args: &RemoveArgs) -> Result<()> {
    let client = super::connect(&args.socket)?;
    let mut report = RemoveReport::default();
    for name in &args.names {
        match pattern::selected(&client, name) {
            Ok(entries) => {
                for entry in without_packed(entries) {
                    remove_object(&client, &entry, args.json, &mut report)?;
                }
            }
            Err(error) => fail(error, args.json, &mut report),
        }
    }
    for id in &args.ids {
        let entry = find(&client, *id)?;
        match (entry, client.delete(*id)) {
            (Some(entry), Ok(())) => removed(&entry, 0, args.json, &mut report)?,
            // The object has no entry any more, or none yet: a client may create it at this moment.
            (None, Ok(())) => {}
            (_, Err(error)) => fail(error.into(), args.json, &mut report),
        }
    }
    if args.json {
        terminal::print_json(&report)?;
    }
    if report.failed.is_empty() { Ok(()) } else { Err(Reported.into()) }
}

/// Removes the objects of packs that are deleted themselves, because a pack is deleted with all of its objects.
fn without_packed(entries: Vec<Entry>) -> Vec<Entry> {
    let ids: std::collections::BTreeSet<_> = entries.iter().map(|entry| entry.id).collect();
    let is_packed = |entry: &Entry| entry.pack.is_some_and(|first| first != entry.id && ids.contains(&first));
    entries.into_iter().filter(|entry| !is_packed(entry)).collect()
}

fn find(client: &Client, id: ObjectId) -> Result<Option<Entry>> {
    let all = client.list("")?.into_iter().chain(client.drafts("")?);
    Ok(all.into_iter().find(|entry| entry.id == id))
}

fn remove_object(client: &Client, entry: &Entry, json: bool, report: &mut RemoveReport) -> Result<()> {
    let is_packed = |other: &Entry| other.pack == Some(entry.id) && other.id != entry.id;
    let objects = match entry.pack {
        Some(_) => client.list("")?.iter().filter(|other| is_packed(other)).count(),
        None => 0,
    };
    match client.delete(entry.id) {
        Ok(()) => removed(entry, objects, json, report),
        Err(error) => {
            fail(Error::from(error).context(format!("cannot remove `{}`", entry.name)), json, report);
            Ok(())
        }
    }
}

fn removed(entry: &Entry, objects: usize, json: bool, report: &mut RemoveReport) -> Result<()> {
    if !json {
        let name = if entry.name.is_empty() { entry.id.to_string() } else { terminal::escaped(&entry.name) };
        // A draft has no version.
        let version = if entry.version == 0 { String::new() } else { format!(" version {}", entry.version) };
        let packed = if objects == 0 { String::new() } else { format!(", {}", count(objects, "object")) };
        terminal::print(&format!("removed {name}{version}, {}{packed}\n", RoundedSize(entry.len)))?;
    }
    let (name, id, version, len) = (entry.name.clone(), entry.id.as_u64(), entry.version, entry.len);
    report.removed.push(RemovedObject { name, id, version, len, objects });
    Ok(())
}

/// Reports an object that was not deleted; the others are deleted all the same.
fn fail(error: Error, json: bool, report: &mut RemoveReport) {
    if !json {
        failure::print(&error);
    }
    report.failed.push(failure::ErrorReport::new(&error));
}
