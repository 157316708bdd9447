//! Tests of `wholemem doctor`.

use serde_json::{Value, json};
use wholemem_hal::{Backend, BackendKind, Capability};
use wholemem_os::probe;

use crate::json::{assert_keys, list, object};
use crate::run::run;

fn report() -> Value {
    object(&run(&["doctor", "--json"]))
}

#[test]
fn json_has_the_documented_keys() {
    let report = report();
    assert_keys(&report, &["version", "backends"]);
    assert_eq!(report["version"], env!("CARGO_PKG_VERSION"));
    let names: Vec<_> = list(&report["backends"]).iter().map(|backend| &backend["name"]).collect();
    assert_eq!(names, ["cuda", "host"]);
    for backend in list(&report["backends"]) {
        assert_keys(backend, &["name", "available", "reason", "devices"]);
        let available = backend["available"].as_bool().unwrap();
        assert_eq!(available, backend["reason"].is_null(), "{backend}");
        assert!(available || list(&backend["devices"]).is_empty(), "{backend}");
        for (id, device) in list(&backend["devices"]).iter().enumerate() {
            assert_keys(device, &["id", "name", "memory_bytes", "capabilities"]);
            assert_eq!(device["id"], id);
            assert!(!device["name"].as_str().unwrap().is_empty());
            assert!(device["memory_bytes"].as_u64().unwrap() > 0);
            for tried in list(&device["capabilities"]) {
                assert_keys(tried, &["name", "ok", "reason"]);
                // A capability that fails has a reason. For one that works, the reason may be a version or null.
                assert!(tried["ok"].as_bool().unwrap() || tried["reason"].is_string(), "{tried}");
            }
        }
    }
}

#[test]
fn the_host_backend_reports_its_devices_and_kernel_features() {
    let report = report();
    let host = &report["backends"][1];
    let backend = Backend::open(BackendKind::Host).unwrap();
    assert_eq!(host["available"], true);
    assert_eq!(list(&host["devices"]).len(), backend.devices().len());
    let names = Capability::ALL.map(Capability::name).into_iter();
    let names: Vec<_> = names.chain(probe::all().iter().map(|probe| probe.name)).collect();
    for device in list(&host["devices"]) {
        let tried: Vec<_> = list(&device["capabilities"]).iter().map(|tried| &tried["name"]).collect();
        assert_eq!(tried, names);
        let of = |name: &str| {
            list(&device["capabilities"]).iter().find(|tried| tried["name"] == name).unwrap().clone()
        };
        assert_eq!(of("create"), json!({ "name": "create", "ok": true, "reason": null }));
        assert_eq!(of("fd-passing"), json!({ "name": "fd-passing", "ok": true, "reason": null }));
        let reason = "host memory is shared as a file descriptor";
        assert_eq!(of("fabric"), json!({ "name": "fabric", "ok": false, "reason": reason }));
    }
}

#[test]
fn cuda_is_available_or_has_a_reason() {
    let report = report();
    let cuda = &report["backends"][0];
    match Backend::open(BackendKind::Cuda) {
        Ok(_) => assert_eq!(cuda["available"], true),
        Err(error) => {
            let reason = cuda["reason"].as_str().unwrap();
            assert!(reason.contains("libcuda.so.1"), "{reason}");
            assert_eq!(error.to_string(), format!("the cuda backend is not available: {reason}"));
        }
    }
}

#[test]
fn the_text_report_has_every_reason() {
    let run = run(&["doctor"]);
    assert_eq!((run.code, run.stderr.as_str()), (Some(0), ""));
    let mut lines = run.stdout.lines();
    assert_eq!(lines.next(), Some(concat!("wholemem ", env!("CARGO_PKG_VERSION"))));
    let has = |expected: &str| {
        let squeezed = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        assert!(run.stdout.lines().any(|line| squeezed(line) == expected), "{expected}: {}", run.stdout);
    };
    has("host: available");
    has("create yes");
    has("fabric no host memory is shared as a file descriptor");
    assert!(!run.stdout.contains('\x1b'), "escape sequences in output that is not a terminal");
}
