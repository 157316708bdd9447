//! The report of the doctor, and subscriptions to log events.

use std::ffi::{CStr, CString, c_char, c_void};
use std::ptr;
use std::sync::Mutex;

use wholemem_capi::doctor::*;
use wholemem_capi::log::*;
use wholemem_capi::status::*;
use wholemem_capi::text::*;
use wholemem_testkit::{Rank as Process, Ranks, test_name};

use super::support::{fails, local, ok, on_each};

fn report(format: wm_report_format_t) -> String {
    let (mut report, mut characters, mut len) = (wm_text_t { value: 0 }, ptr::null(), 0);
    // SAFETY: the pointer is valid.
    ok(unsafe { wm_doctor(format, &raw mut report) });
    // SAFETY: the pointers are valid.
    ok(unsafe { wm_text_data(report, &raw mut characters, &raw mut len) });
    // SAFETY: the text ends with a NUL, and is valid until it is freed.
    let text = unsafe { CStr::from_ptr(characters) }.to_str().unwrap().to_owned();
    assert_eq!(text.len() as u64, len);
    ok(wm_text_destroy(report));
    fails(wm_text_destroy(report), WM_ERROR_INVALID_HANDLE);
    text
}

#[test]
fn the_doctor_reports_what_works_as_text_and_as_json() {
    let text = report(WM_REPORT_TEXT);
    assert!(text.starts_with(&format!("wholemem {}\n\n", env!("CARGO_PKG_VERSION"))), "{text}");
    assert!(text.contains("\nhost: available\n") && text.contains("\n    create: yes\n"), "{text}");
    let json: serde_json::Value = serde_json::from_str(&report(WM_REPORT_JSON)).unwrap();
    let host = json["backends"].as_array().unwrap().iter().find(|backend| backend["name"] == "host").unwrap();
    assert_eq!(host["available"], true);
    let create = &host["devices"][0]["capabilities"][0];
    assert_eq!((&create["name"], &create["ok"]), (&"create".into(), &true.into()));
    // SAFETY: the pointer is valid.
    fails(unsafe { wm_doctor(2, &mut wm_text_t { value: 0 }) }, WM_ERROR_INVALID_ARGUMENT);
}

static SEEN: Mutex<Vec<(wm_log_level_t, String, String)>> = Mutex::new(Vec::new());

/// Records an event. It calls the library, as the functions of programs may.
unsafe extern "C" fn record(data: *mut c_void, level: u32, target: *const c_char, message: *const c_char) {
    // SAFETY: the texts end with a NUL.
    let [target, message] =
        [target, message].map(|text| unsafe { CStr::from_ptr(text) }.to_str().unwrap().to_owned());
    // SAFETY: the data is the number that was passed.
    assert_eq!(unsafe { data.cast::<u32>().read() }, 77);
    fails(wm_text_destroy(wm_text_t { value: 0 }), WM_ERROR_INVALID_HANDLE);
    SEEN.lock().unwrap().push((level, target, message));
}

fn subscribe(filter: &str, data: &u32) -> Result<wm_log_subscription_t, wm_status_t> {
    let (filter, mut subscription) = (CString::new(filter).unwrap(), wm_log_subscription_t { value: 0 });
    let data = ptr::from_ref(data).cast_mut().cast();
    // SAFETY: the function accepts the data, which outlives the subscription.
    match unsafe { wm_log_subscribe(filter.as_ptr(), Some(record), data, &raw mut subscription) } {
        WM_OK => Ok(subscription),
        status => Err(status),
    }
}

fn make_events() {
    on_each(local(2), |_, _| {});
}

/// A process of its own, because a process has one filter.
#[test]
fn events_are_passed_to_the_function_of_the_program() {
    Ranks::of(1).run(test_name!(), |_: &Process| {
        let data = 77;
        assert_eq!(subscribe("loud", &data), Err(WM_ERROR_INVALID_ARGUMENT));
        let first = subscribe("trace", &data).unwrap();
        assert_eq!(subscribe("trace", &data), Err(WM_ERROR_BUSY));
        make_events();
        ok(wm_log_subscription_destroy(first));
        let seen = std::mem::take(&mut *SEEN.lock().unwrap());
        assert!(!seen.is_empty(), "creating a communicator emits events");
        for (level, target, message) in &seen {
            assert!((WM_LOG_ERROR..=WM_LOG_TRACE).contains(level), "{level}");
            assert!(target.starts_with("wholemem") && !message.is_empty(), "{target}: {message}");
        }
        make_events();
        assert!(SEEN.lock().unwrap().is_empty(), "a subscription that was freed gets no events");
        assert_eq!(subscribe("debug", &data), Err(WM_ERROR_INVALID_ARGUMENT));
        let second = subscribe("trace", &data).unwrap();
        make_events();
        ok(wm_log_subscription_destroy(second));
        assert!(!SEEN.lock().unwrap().is_empty());
    });
}
