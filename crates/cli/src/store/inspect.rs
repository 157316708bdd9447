//! `wholemem ls` and `stat`: list and show objects of a store, and show the store itself.

use std::time::{Duration, SystemTime};

use anyhow::Result;
use serde::Serialize;
use wholemem_command::size::RoundedSize;
use wholemem_command::table::{Align, TextTable};
use wholemem_command::terminal::{self, Colour, TextStyle};
use wholemem_os::width::to_usize;
use wholemem_store::{Client, Status, Usage};

use super::pattern;
use super::summary::{ObjectSummary, Summarizer, rounded_time};
use crate::cli::{ListArgs, StatArgs};

pub(crate) fn list(args: &ListArgs) -> Result<()> {
    let client = super::connect(&args.socket)?;
    let summarizer = Summarizer::new(&client)?;
    if args.drafts {
        let drafts = summarizer.summarize(&pattern::sorted(client.drafts(&args.names)?));
        return print_drafts(drafts, args.json);
    }
    let mut entries = pattern::listed(&client, &args.names)?;
    if !args.all {
        pattern::fold_packs(&mut entries);
    }
    if args.json {
        #[derive(Serialize)]
        struct Objects {
            objects: Vec<ObjectSummary>,
        }
        return terminal::print_json(&Objects { objects: summarizer.with_readers(&entries)? });
    }
    let table = match args.long {
        true => long_table(&summarizer.with_readers(&entries)?),
        false => short_table(&summarizer.summarize(&entries)),
    };
    terminal::print(&table.render(Colour::of_stdout()))
}

fn short_table(objects: &[ObjectSummary]) -> TextTable {
    let columns = [
        ("size", Align::Right),
        ("version", Align::Right),
        ("owner", Align::Left),
        ("content", Align::Left),
        ("name", Align::Left),
    ];
    let mut table = TextTable::new(columns);
    for object in objects {
        let size = RoundedSize(object.len).to_string();
        let cells = [
            size,
            object.version.to_string(),
            object.owner_name.clone(),
            object.content(),
            terminal::escaped(&object.name),
        ];
        table.row(TextStyle::Plain, cells);
    }
    table
}

fn long_table(objects: &[ObjectSummary]) -> TextTable {
    let columns = [
        ("size", Align::Right),
        ("version", Align::Right),
        ("age", Align::Right),
        ("readers", Align::Right),
        ("place", Align::Left),
        ("owner", Align::Left),
        ("content", Align::Left),
        ("name", Align::Left),
    ];
    let mut table = TextTable::new(columns);
    for object in objects {
        let cells = [
            RoundedSize(object.len).to_string(),
            object.version.to_string(),
            object.age(),
            object.readers.map(|readers| readers.to_string()).unwrap_or_default(),
            object.place.to_owned(),
            object.owner_name.clone(),
            object.content(),
            terminal::escaped(&object.name),
        ];
        table.row(TextStyle::Plain, cells);
    }
    table
}

/// Prints a list of drafts, objects that are not sealed yet. Drafts have no version, so their ids are printed.
fn print_drafts(drafts: Vec<ObjectSummary>, json: bool) -> Result<()> {
    if json {
        #[derive(Serialize)]
        struct Drafts {
            drafts: Vec<ObjectSummary>,
        }
        return terminal::print_json(&Drafts { drafts });
    }
    let columns = [
        ("size", Align::Right),
        ("id", Align::Right),
        ("age", Align::Right),
        ("place", Align::Left),
        ("owner", Align::Left),
        ("name", Align::Left),
    ];
    let mut table = TextTable::new(columns);
    for draft in drafts {
        let id = wholemem_store::ObjectId::from_u64(draft.id).map(|id| id.to_string()).unwrap_or_default();
        let cells = [
            RoundedSize(draft.len).to_string(),
            id,
            draft.age(),
            draft.place.to_owned(),
            draft.owner_name.clone(),
            terminal::escaped(&draft.name),
        ];
        table.row(TextStyle::Plain, cells);
    }
    terminal::print(&table.render(Colour::of_stdout()))
}

pub(crate) fn stat(args: &StatArgs) -> Result<()> {
    let client = super::connect(&args.socket)?;
    match &args.name {
        Some(name) => stat_object(&client, name, args.json),
        None => stat_store(&client, args.json),
    }
}

fn stat_object(client: &Client, name: &str, json: bool) -> Result<()> {
    let entry = client.stat(name)?;
    let mut all = Summarizer::new(client)?.with_readers(std::slice::from_ref(&entry))?;
    let Some(object) = all.pop() else { return Ok(()) };
    if json {
        return terminal::print_json(&object);
    }
    let mut lines = vec![
        ("name", terminal::escaped(&object.name)),
        ("content", object.content()),
        ("size", format!("{} ({} bytes)", RoundedSize(object.len), object.len)),
        ("version", object.version.to_string()),
        ("age", object.age()),
        ("readers", object.readers.map(|readers| readers.to_string()).unwrap_or_default()),
        ("place", object.place.to_owned()),
        ("owner", object.owner_name.clone()),
        ("id", entry.id.to_string()),
    ];
    if let Some(first) = entry.pack.filter(|first| *first != entry.id) {
        let pack = client.list("")?.into_iter().find(|entry| entry.id == first);
        lines.push(("pack", pack.map_or_else(|| first.to_string(), |pack| terminal::escaped(&pack.name))));
    }
    if !object.description.is_empty() {
        lines.push(("description", terminal::escaped(&object.description)));
    }
    print_lines(&lines)
}

/// The state of a store and its server process.
#[derive(Debug, Serialize)]
struct StoreSummary {
    #[serde(flatten)]
    status: Status,
    server: ServerSummary,
}

#[derive(Debug, Serialize)]
struct ServerSummary {
    pid: u32,
    /// The number of servers that have served the store, with this one.
    number: u64,
    started_ms: u64,
}

fn stat_store(client: &Client, json: bool) -> Result<()> {
    let statistics = client.statistics()?;
    let status = statistics.status;
    if json {
        let (pid, number, started_ms) = (statistics.server, status.epoch, statistics.started);
        return terminal::print_json(&StoreSummary {
            status,
            server: ServerSummary { pid, number, started_ms },
        });
    }
    let of = |usage: Usage| {
        let bytes = |count: u64| RoundedSize(to_usize(count));
        format!("{} of {}", bytes(usage.used), bytes(usage.quota))
    };
    let started = SystemTime::UNIX_EPOCH + Duration::from_millis(statistics.started);
    let since = rounded_time(started.elapsed().unwrap_or_default());
    print_lines(&[
        ("objects", status.objects.to_string()),
        ("unsealed", status.unsealed.to_string()),
        ("retired", status.retired.to_string()),
        ("clients", status.clients.to_string()),
        ("host", of(status.host)),
        ("device", of(status.device)),
        ("server", format!("process {}, number {}, started {since} ago", statistics.server, status.epoch)),
    ])
}

fn print_lines(lines: &[(&str, String)]) -> Result<()> {
    terminal::print(&lines.iter().map(|(name, value)| format!("  {name:<12}{value}\n")).collect::<String>())
}
