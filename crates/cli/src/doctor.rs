//! `wholemem doctor`: tries every feature on this machine and reports which work, and why others do not.

use std::fmt::Write;

use anyhow::{Result, ensure};
use serde::Serialize;
use wholemem_command::size::RoundedSize;
use wholemem_command::table::{Align, TextTable};
use wholemem_command::terminal::{self, Colour, TextStyle};
use wholemem_hal::doctor::{self, BackendFindings, DeviceFindings, Finding};
use wholemem_hal::{BackendKind, Capability};

use crate::cli::DoctorArgs;

#[derive(Debug, Serialize)]
struct DoctorReport {
    version: &'static str,
    backends: Vec<BackendReport>,
}

#[derive(Debug, Serialize)]
struct BackendReport {
    name: String,
    available: bool,
    reason: Option<String>,
    devices: Vec<DeviceReport>,
}

#[derive(Debug, Serialize)]
struct DeviceReport {
    id: u32,
    name: String,
    memory_bytes: usize,
    capabilities: Vec<CapabilityReport>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct CapabilityReport {
    name: String,
    ok: bool,
    reason: Option<String>,
}

pub(crate) fn run(args: &DoctorArgs) -> Result<()> {
    let report = examine();
    if args.json {
        terminal::print_json(&report)?;
    } else {
        terminal::print(&terminal::fitted(&render(&report, Colour::of_stdout())))?;
    }
    ensure!(
        report.host_works(),
        "the host backend does not work on this machine; every other feature needs it"
    );
    Ok(())
}

fn examine() -> DoctorReport {
    let backends = doctor::examine().into_iter().map(BackendReport::from);
    DoctorReport { version: env!("CARGO_PKG_VERSION"), backends: backends.collect() }
}

impl From<BackendFindings> for BackendReport {
    fn from(found: BackendFindings) -> Self {
        let (available, reason, devices) = match found.devices {
            Ok(devices) => (true, None, devices),
            Err(reason) => (false, Some(reason), Vec::new()),
        };
        let devices = devices.into_iter().map(DeviceReport::from).collect();
        Self { name: found.kind.to_string(), available, reason, devices }
    }
}

impl From<DeviceFindings> for DeviceReport {
    fn from(found: DeviceFindings) -> Self {
        let report = |finding: Finding| CapabilityReport {
            name: finding.name,
            ok: finding.works,
            reason: finding.reason,
        };
        let capabilities = found.findings.into_iter().map(report).collect();
        let info = found.info;
        Self { id: info.id.0, name: info.name, memory_bytes: info.memory_len, capabilities }
    }
}

impl DoctorReport {
    /// Returns true if memory can be allocated on every device of the host backend.
    fn host_works(&self) -> bool {
        let host = BackendKind::Host.to_string();
        let creates = |device: &DeviceReport| {
            device.capabilities.iter().any(|tried| tried.name == Capability::Create.name() && tried.ok)
        };
        self.backends
            .iter()
            .any(|backend| backend.name == host && backend.available && backend.devices.iter().all(creates))
    }
}

fn render(report: &DoctorReport, colour: Colour) -> String {
    let mut text = format!("wholemem {}\n", report.version);
    for backend in &report.backends {
        let available = if backend.available { "available" } else { "not available" };
        let tone = if backend.available { TextStyle::Success } else { TextStyle::Error };
        let title = colour.paint(TextStyle::Heading, &format!("{}:", backend.name));
        let reason = backend.reason.as_ref().map(|reason| format!(": {reason}"));
        let available = colour.paint(tone, available);
        let _ = write!(text, "\n{title} {available}{}\n", reason.unwrap_or_default());
        // Consecutive devices with equal capabilities are printed with one common table.
        let groups = backend.devices.chunk_by(|a, b| a.capabilities == b.capabilities);
        for (index, group) in groups.enumerate() {
            if index > 0 {
                text.push('\n');
            }
            for device in group {
                let (memory, name) = (RoundedSize(device.memory_bytes), &device.name);
                let _ = writeln!(text, "  {}:{}  {name}, {memory}", backend.name, device.id);
            }
            if let Some(device) = group.first() {
                let _ = write!(text, "\n{}", capability_table(device).render(colour));
            }
        }
    }
    text
}

fn capability_table(device: &DeviceReport) -> TextTable {
    let mut table =
        TextTable::new([("capability", Align::Left), ("works", Align::Left), ("reason", Align::Left)]);
    for tried in &device.capabilities {
        let (works, tone) = if tried.ok { ("yes", TextStyle::Plain) } else { ("no", TextStyle::Dim) };
        let reason = tried.reason.clone().unwrap_or_default();
        table.row(tone, [tried.name.clone(), works.to_owned(), reason]);
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tried(name: &str, reason: Option<&str>) -> CapabilityReport {
        CapabilityReport { name: name.to_owned(), ok: reason.is_none(), reason: reason.map(str::to_owned) }
    }

    fn example(creates: Option<&str>) -> DoctorReport {
        let device = |id, reason| DeviceReport {
            id,
            name: format!("NUMA node {id}"),
            memory_bytes: 1 << 30,
            capabilities: vec![tried("create", reason), tried("fabric", Some("not here"))],
        };
        let cuda = BackendReport {
            name: "cuda".to_owned(),
            available: false,
            reason: Some("no driver".to_owned()),
            devices: Vec::new(),
        };
        let host = BackendReport {
            name: "host".to_owned(),
            available: true,
            reason: None,
            devices: vec![device(0, None), device(1, None), device(2, creates)],
        };
        DoctorReport { version: "1.2.3", backends: vec![cuda, host] }
    }

    #[test]
    fn devices_with_equal_capabilities_share_a_table() {
        let expected = "\
wholemem 1.2.3

cuda: not available: no driver

host: available
  host:0  NUMA node 0, 1 GiB
  host:1  NUMA node 1, 1 GiB

  capability  works  reason
  create      yes
  fabric      no     not here

  host:2  NUMA node 2, 1 GiB

  capability  works  reason
  create      no     full
  fabric      no     not here
";
        assert_eq!(render(&example(Some("full")), Colour::Off), expected);
    }

    #[test]
    fn the_host_works_if_memory_can_be_allocated_on_all_devices() {
        assert!(example(None).host_works());
        assert!(!example(Some("full")).host_works());
        let mut absent = example(None);
        absent.backends[1].available = false;
        assert!(!absent.host_works());
    }
}
