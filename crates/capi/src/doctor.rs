//! Which features work on this machine, and why others do not.

use std::ffi::CString;
use std::fmt::Write;

use serde::Serialize;
use wholemem_hal::doctor::{BackendFindings, examine};

use crate::argument::{Output, invalid};
use crate::call::call;
use crate::failure::Result;
use crate::status::wm_status_t;
use crate::text::wm_text_t;

/// The format of a report: `WM_REPORT_TEXT` or `WM_REPORT_JSON`.
pub type wm_report_format_t = u32;
/// Lines for people.
pub const WM_REPORT_TEXT: wm_report_format_t = 0;
/// The JSON of `wholemem doctor --json`.
pub const WM_REPORT_JSON: wm_report_format_t = 1;

#[derive(Serialize)]
struct Report {
    version: &'static str,
    backends: Vec<BackendReport>,
}

#[derive(Serialize)]
struct BackendReport {
    name: String,
    available: bool,
    reason: Option<String>,
    devices: Vec<DeviceReport>,
}

#[derive(Serialize)]
struct DeviceReport {
    id: u32,
    name: String,
    memory_bytes: usize,
    capabilities: Vec<CapabilityReport>,
}

#[derive(Serialize)]
struct CapabilityReport {
    name: String,
    ok: bool,
    reason: Option<String>,
}

impl From<BackendFindings> for BackendReport {
    fn from(found: BackendFindings) -> Self {
        let (available, reason, devices) = match found.devices {
            Ok(devices) => (true, None, devices),
            Err(reason) => (false, Some(reason), Vec::new()),
        };
        let devices = devices.into_iter().map(|device| {
            let findings = device.findings.into_iter();
            let capabilities = findings.map(|finding| CapabilityReport {
                name: finding.name,
                ok: finding.works,
                reason: finding.reason,
            });
            DeviceReport {
                id: device.info.id.0,
                name: device.info.name,
                memory_bytes: device.info.memory_len,
                capabilities: capabilities.collect(),
            }
        });
        Self { name: found.kind.to_string(), available, reason, devices: devices.collect() }
    }
}

impl Report {
    fn text(&self) -> String {
        let mut text = format!("wholemem {}\n", self.version);
        for backend in &self.backends {
            let available = if backend.available { "available" } else { "not available" };
            // Writing to a `String` does not fail.
            let _ = writeln!(text, "\n{}: {available}{}", backend.name, reason(backend.reason.as_deref()));
            for device in &backend.devices {
                let (id, len) = (device.id, device.memory_bytes);
                let _ = writeln!(text, "  {}:{id}  {}, {len} bytes", backend.name, device.name);
                for tried in &device.capabilities {
                    let works = if tried.ok { "yes" } else { "no" };
                    let _ = writeln!(text, "    {}: {works}{}", tried.name, reason(tried.reason.as_deref()));
                }
            }
        }
        text
    }
}

fn reason(reason: Option<&str>) -> String {
    reason.map(|reason| format!(", {reason}")).unwrap_or_default()
}

/// Tries every feature of every device of this machine, and returns a report of which work, and why others do not. The caller frees the
/// text with `wm_text_destroy`.
///
/// The call opens all backends, and takes from milliseconds to seconds.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_doctor(format: wm_report_format_t, report: *mut wm_text_t) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or valid, as the header requires.
        let output = unsafe { Output::new(report, "report") }?;
        if ![WM_REPORT_TEXT, WM_REPORT_JSON].contains(&format) {
            return Err(invalid(format!("there is no format {format} of a report")));
        }
        let backends = examine().into_iter().map(BackendReport::from).collect();
        let report = Report { version: env!("CARGO_PKG_VERSION"), backends };
        let text = match format {
            WM_REPORT_JSON => json(&report)?,
            _ => report.text(),
        };
        let text = CString::new(text).map_err(|_| invalid("a name in the report has a NUL"))?;
        output.write(wm_text_t::create(text)?);
        Ok(())
    })
}

fn json(report: &Report) -> Result<String> {
    serde_json::to_string_pretty(report).map_err(|error| invalid(format!("the report is no JSON: {error}")))
}
