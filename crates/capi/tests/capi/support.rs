//! Shared parts of the tests: communicators, statuses with messages, and the built library.

use std::ffi::CStr;
use std::path::{Path, PathBuf};
use std::ptr;

use wholemem_capi::communicator::*;
use wholemem_capi::device::*;
use wholemem_capi::last_error::wm_last_error;
use wholemem_capi::status::*;

/// Returns the message of the last call.
pub(crate) fn last_error() -> String {
    // SAFETY: the text is valid until the next call of this thread.
    unsafe { CStr::from_ptr(wm_last_error()) }.to_str().unwrap().to_owned()
}

/// Checks that a call succeeded.
#[track_caller]
pub(crate) fn ok(status: wm_status_t) {
    assert_eq!(status, WM_OK, "{}", last_error());
}

/// Checks that a call failed with a status, and returns its message.
#[track_caller]
pub(crate) fn fails(status: wm_status_t, expected: wm_status_t) -> String {
    assert_eq!(status, expected, "{}", last_error());
    last_error()
}

/// Opens the host backend with virtual devices, and creates a communicator for each of `count` ranks.
pub(crate) fn local(count: u32) -> Vec<wm_communicator_t> {
    let mut backend = wm_backend_t { value: 0 };
    // SAFETY: the pointer is valid.
    ok(unsafe { wm_backend_open(WM_BACKEND_HOST, count, &raw mut backend) });
    let mut devices = vec![wm_device_t { value: 0 }; count as usize];
    for (number, device) in (0..).zip(&mut devices) {
        // SAFETY: the pointer is valid.
        ok(unsafe { wm_device_open(backend, number, device) });
    }
    let mut communicators = vec![wm_communicator_t { value: 0 }; count as usize];
    // SAFETY: both arrays have `count` elements.
    ok(unsafe {
        wm_communicator_create_local(devices.as_ptr(), count, ptr::null(), communicators.as_mut_ptr())
    });
    ok(wm_backend_destroy(backend));
    devices.into_iter().for_each(|device| ok(wm_device_destroy(device)));
    communicators
}

/// Calls `work` for each communicator in a thread of its own, with the number of the rank, and then destroys the communicators.
pub(crate) fn on_each(communicators: Vec<wm_communicator_t>, work: impl Fn(wm_communicator_t, u32) + Sync) {
    std::thread::scope(|scope| {
        for (rank, communicator) in (0..).zip(&communicators) {
            let work = &work;
            scope.spawn(move || work(*communicator, rank));
        }
    });
    communicators.into_iter().for_each(|communicator| ok(wm_communicator_destroy(communicator)));
}

/// Returns the root of the repository.
pub(crate) fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap().to_owned()
}

/// Returns the folder with the shared library, which cargo builds next to the tests.
pub(crate) fn library_folder() -> PathBuf {
    let folder = std::env::current_exe().unwrap().parent().unwrap().to_owned();
    assert!(folder.join("libwholemem_capi.so").exists(), "no library in {}", folder.display());
    folder
}

/// Creates a link to the shared library in `folder`, with the name under which programs load it, and returns the linker's option for a
/// program that loads it from there, even if `LD_LIBRARY_PATH`, which cargo sets, has an older one.
pub(crate) fn run_path(folder: &Path) -> String {
    let name = format!("libwholemem.so.{}", wholemem_capi::version::WM_ABI_MAJOR);
    let link = folder.join(name);
    if !link.exists() {
        std::os::unix::fs::symlink(library_folder().join("libwholemem_capi.so"), link).unwrap();
    }
    format!("-Wl,--disable-new-dtags,-rpath,{}", folder.display())
}
