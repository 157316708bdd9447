//! `wholemem ls`, `stat` and `rm`: lists, shows and deletes objects of a store.

use anyhow::Result;
use serde::Serialize;
use wholemem_command::size::RoundedSize;
use wholemem_command::table::{Align, TextTable};
use wholemem_command::terminal::{self, Colour, TextStyle};
use wholemem_os::width::to_usize;
use wholemem_store::Entry;

use crate::cli::{ListArgs, RemoveArgs, StatArgs};

/// The properties of an object of a store, printed as JSON.
#[derive(Debug, Serialize)]
struct ObjectSummary<'a> {
    name: &'a str,
    id: u64,
    len: usize,
    version: u64,
    owner: u32,
    created_ms: u64,
    place: &'static str,
    #[serde(skip_serializing_if = "Option::is_none")]
    pack: Option<u64>,
    #[serde(skip_serializing_if = "str::is_empty")]
    description: String,
}

fn described(entry: &Entry) -> ObjectSummary<'_> {
    ObjectSummary {
        name: &entry.name,
        id: entry.id.as_u64(),
        len: entry.len,
        version: entry.version,
        owner: entry.owner,
        created_ms: entry.created,
        place: place(entry),
        pack: entry.pack.map(wholemem_store::ObjectId::as_u64),
        description: String::from_utf8_lossy(&entry.meta).into_owned(),
    }
}

fn place(entry: &Entry) -> &'static str {
    if entry.is_cpu { "host" } else { "device" }
}

pub(crate) fn list(args: &ListArgs) -> Result<()> {
    let client = super::connect(&args.socket)?;
    if args.drafts {
        return list_drafts(&client.drafts(&args.prefix)?, args.json);
    }
    let entries = client.list(&args.prefix)?;
    if args.json {
        #[derive(Serialize)]
        struct Objects<'a> {
            objects: Vec<ObjectSummary<'a>>,
        }
        return terminal::print_json(&Objects { objects: entries.iter().map(described).collect() });
    }
    let mut table = TextTable::new([
        ("name", Align::Left),
        ("size", Align::Right),
        ("version", Align::Right),
        ("place", Align::Left),
        ("owner", Align::Right),
    ]);
    for entry in &entries {
        let size = RoundedSize(entry.len).to_string();
        let (version, owner) = (entry.version.to_string(), entry.owner.to_string());
        table.row(
            TextStyle::Plain,
            [terminal::escaped(&entry.name), size, version, place(entry).to_owned(), owner],
        );
    }
    terminal::print(&table.render(Colour::of_stdout()))
}

/// Prints a list of drafts, objects that are not sealed yet. Drafts have no version, so their ids are printed.
fn list_drafts(drafts: &[Entry], json: bool) -> Result<()> {
    if json {
        #[derive(Serialize)]
        struct Drafts<'a> {
            drafts: Vec<ObjectSummary<'a>>,
        }
        return terminal::print_json(&Drafts { drafts: drafts.iter().map(described).collect() });
    }
    let mut table = TextTable::new([
        ("name", Align::Left),
        ("size", Align::Right),
        ("id", Align::Right),
        ("place", Align::Left),
        ("owner", Align::Right),
    ]);
    for draft in drafts {
        let (size, id, owner) =
            (RoundedSize(draft.len).to_string(), draft.id.to_string(), draft.owner.to_string());
        table.row(
            TextStyle::Plain,
            [terminal::escaped(&draft.name), size, id, place(draft).to_owned(), owner],
        );
    }
    terminal::print(&table.render(Colour::of_stdout()))
}

pub(crate) fn stat(args: &StatArgs) -> Result<()> {
    let client = super::connect(&args.socket)?;
    if let Some(name) = &args.name {
        let entry = client.stat(name)?;
        let described = described(&entry);
        if args.json {
            return terminal::print_json(&described);
        }
        let mut lines = vec![
            ("name", terminal::escaped(&entry.name)),
            ("size", format!("{} ({} bytes)", RoundedSize(entry.len), entry.len)),
            ("version", entry.version.to_string()),
            ("place", place(&entry).to_owned()),
            ("owner", entry.owner.to_string()),
            ("id", entry.id.to_string()),
        ];
        if !described.description.is_empty() {
            lines.push(("description", terminal::escaped(&described.description)));
        }
        let text = lines.iter().map(|(name, value)| format!("  {name:<12}{value}\n"));
        return terminal::print(&text.collect::<String>());
    }
    let status = client.status()?;
    if args.json {
        return terminal::print_json(&status);
    }
    let of = |usage: wholemem_store::Usage| {
        let bytes = |count: u64| RoundedSize(to_usize(count));
        format!("{} of {}", bytes(usage.used), bytes(usage.quota))
    };
    let lines = [
        ("objects", status.objects.to_string()),
        ("unsealed", status.unsealed.to_string()),
        ("retired", status.retired.to_string()),
        ("clients", status.clients.to_string()),
        ("host", of(status.host)),
        ("device", of(status.device)),
        ("servers", status.epoch.to_string()),
    ];
    terminal::print(&lines.map(|(name, value)| format!("  {name:<12}{value}\n")).concat())
}

pub(crate) fn remove(args: &RemoveArgs) -> Result<()> {
    let client = super::connect(&args.socket)?;
    for name in &args.names {
        client.delete(client.stat(name)?.id)?;
    }
    for id in &args.ids {
        client.delete(*id)?;
    }
    Ok(())
}
