//! `wholemem watch`: prints the events of a store.

use anyhow::Result;
use serde::Serialize;
use wholemem_command::terminal;
use wholemem_os::Deadline;
use wholemem_store::{Error, Event, EventKind};

use crate::cli::WatchArgs;

/// An event of a store, printed as JSON or as a line.
#[derive(Debug, Serialize)]
struct EventLine<'a> {
    event: &'static str,
    name: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    id: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    version: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    previous: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    objects: Option<u64>,
    revision: u64,
}

impl<'a> EventLine<'a> {
    fn new(event: &'a Event) -> Self {
        let (kind, version, previous) = match event.kind {
            EventKind::Published { version } => ("published", version, None),
            EventKind::Replaced { version, previous } => ("replaced", version, Some(previous)),
            EventKind::Deleted { version } => ("deleted", version, None),
            other => unreachable!("this program and the store library have one version: {other:?}"),
        };
        Self {
            event: kind,
            name: &event.name,
            id: Some(event.object.as_u64()),
            version: Some(version),
            previous,
            objects: Some(event.objects),
            revision: event.revision,
        }
    }

    /// Returns the line for events that are lost. The user should list the objects again.
    fn missed(prefix: &'a str, revision: u64) -> Self {
        let (id, version, previous, objects) = (None, None, None, None);
        Self { event: "missed", name: prefix, id, version, previous, objects, revision }
    }

    fn text(&self) -> String {
        let version = match (self.version, self.previous) {
            (Some(version), Some(previous)) => format!(" version {version}, before {previous}"),
            (Some(version), None) => format!(" version {version}"),
            _ => String::new(),
        };
        let objects = self.objects.filter(|objects| *objects > 1);
        // A pack counts as an object itself, and users count those that it contains.
        let objects = objects.map(|objects| format!(", {} objects", objects - 1)).unwrap_or_default();
        format!("{:<10}{}{version}{objects}\n", self.event, terminal::escaped(self.name))
    }
}

pub(crate) fn watch(args: &WatchArgs) -> Result<()> {
    let mut watch = {
        // The watch has a connection of its own.
        let client = super::connect(&args.socket)?;
        match args.after {
            Some(revision) => client.watch_after(&args.prefix, revision)?,
            None => client.watch(&args.prefix)?,
        }
    };
    let mut left = args.count;
    while left != Some(0) {
        let event = watch.next(Deadline::NEVER);
        let line = match &event {
            Ok(event) => EventLine::new(event),
            Err(Error::EventsMissed { prefix }) => EventLine::missed(prefix, watch.revision()),
            Err(_) => return Ok(event.map(drop)?),
        };
        if args.json {
            terminal::print_json(&line)?;
        } else {
            terminal::print(&line.text())?;
        }
        // A line about lost events does not count as an event.
        if event.is_ok() {
            left = left.map(|left| left - 1);
        }
    }
    Ok(())
}
