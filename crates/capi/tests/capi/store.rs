//! The store: objects, arrays, packs, lists, drafts, watches, device memory, forks and timeouts.

use std::ffi::{CStr, CString, c_char, c_void};
use std::ptr;

use wholemem_capi::device::*;
use wholemem_capi::dtype::*;
use wholemem_capi::status::*;
use wholemem_capi::store::client::*;
use wholemem_capi::store::draft::*;
use wholemem_capi::store::entry::*;
use wholemem_capi::store::object::*;
use wholemem_capi::store::watch::*;
use wholemem_store::Client;
use wholemem_testkit::in_forked_child;

use super::support::{fails, ok};
use super::test_store::TestStore;

const SECOND: u64 = 1_000_000_000;

fn zeroed<T>() -> T {
    // SAFETY: the types of this file are structures of numbers, arrays and pointers, for which zero is a value.
    unsafe { std::mem::zeroed() }
}

fn options() -> wm_store_object_options_t {
    wm_store_object_options_t { struct_size: size_of::<wm_store_object_options_t>(), ..zeroed() }
}

fn entry() -> wm_store_entry_t {
    wm_store_entry_t { struct_size: size_of::<wm_store_entry_t>(), ..zeroed() }
}

fn text(characters: &[c_char]) -> String {
    let bytes: Vec<u8> = characters.iter().map(|byte| byte.to_ne_bytes()[0]).collect();
    CStr::from_bytes_until_nul(&bytes).unwrap().to_str().unwrap().to_owned()
}

fn connect(served: &TestStore) -> wm_store_t {
    served.connect(wm_backend_t { value: 0 })
}

fn put(store: wm_store_t, name: &CStr, bytes: &[u8]) -> wm_store_sealed_t {
    let mut sealed = zeroed();
    // SAFETY: the pointers are valid.
    ok(unsafe {
        wm_store_put(store, name.as_ptr(), bytes.as_ptr().cast(), bytes.len(), ptr::null(), &raw mut sealed)
    });
    sealed
}

fn get(store: wm_store_t, name: &CStr, timeout_ns: u64) -> wm_store_object_t {
    let mut object = zeroed();
    // SAFETY: the pointers are valid.
    ok(unsafe { wm_store_get(store, name.as_ptr(), timeout_ns, &raw mut object) });
    object
}

fn bytes(object: wm_store_object_t) -> Vec<u8> {
    let (mut address, mut len) = (ptr::null(), 0);
    // SAFETY: the pointers are valid.
    ok(unsafe { wm_store_object_data(object, &raw mut address, &raw mut len) });
    // SAFETY: the object has as many bytes at the address while its handle exists.
    unsafe { std::slice::from_raw_parts(address.cast::<u8>(), len as usize) }.to_vec()
}

#[test]
fn objects_are_put_got_listed_and_deleted() {
    let served = TestStore::start();
    let store = connect(&served);
    let first = put(store, c"a/one", b"hello");
    let second = put(store, c"a/one", b"world");
    assert_eq!((first.version, second.version), (1, 2));
    let object = get(store, c"a/one", 0);
    assert_eq!(bytes(object), b"world");
    let large = vec![7_u8; 2 << 20];
    put(store, c"a/two", &large);
    assert_eq!(bytes(get(store, c"a/two", 0)), large);
    assert_eq!(
        Client::connect(served.socket().to_str().unwrap()).unwrap().get("a/two").unwrap().to_vec().unwrap(),
        large
    );

    let (mut list, mut count, mut found) = (zeroed(), 0, entry());
    // SAFETY: the pointers are valid.
    ok(unsafe { wm_store_list(store, c"a/".as_ptr(), 0, &raw mut list) });
    // SAFETY: the pointer is valid.
    ok(unsafe { wm_store_list_count(list, &raw mut count) });
    assert_eq!(count, 2);
    // SAFETY: the pointer is valid, and the structure has the size in its first field.
    ok(unsafe { wm_store_list_entry(list, 1, &raw mut found) });
    assert_eq!(
        (text(&found.name).as_str(), found.len, found.version, found.is_host),
        ("a/two", 2 << 20, 1, 1)
    );
    assert_eq!((found.is_array, found.meta_len, found.pack), (0, 0, 0));
    // SAFETY: the pointer is valid, and the structure has the size in its first field.
    fails(unsafe { wm_store_list_entry(list, 2, &raw mut found) }, WM_ERROR_INVALID_ARGUMENT);
    ok(wm_store_list_destroy(list));

    ok(wm_store_delete(store, second.id));
    assert_eq!(bytes(object), b"world", "an object that is held stays");
    // SAFETY: the pointers are valid.
    let status = unsafe { wm_store_get(store, c"a/one".as_ptr(), 0, &mut zeroed()) };
    fails(status, WM_ERROR_STORE_NO_SUCH_NAME);
    // SAFETY: the pointer is valid.
    let status = unsafe { wm_store_get_by_id(store, second.id, &mut zeroed()) };
    fails(status, WM_ERROR_STORE_NO_SUCH_OBJECT);
    fails(wm_store_delete(store, 0), WM_ERROR_INVALID_ARGUMENT);
    // SAFETY: the text ends with a NUL.
    ok(unsafe { wm_store_delete_name(store, c"a/two".as_ptr()) });
    // SAFETY: the text ends with a NUL.
    fails(unsafe { wm_store_delete_name(store, c"a/two".as_ptr()) }, WM_ERROR_STORE_NO_SUCH_NAME);
    let mut status = wm_store_status_t { struct_size: size_of::<wm_store_status_t>(), ..zeroed() };
    // SAFETY: the pointer is valid, and the structure has the size in its first field.
    ok(unsafe { wm_store_status(store, &raw mut status) });
    assert_eq!((status.objects, status.unsealed, status.host_quota, status.servers), (0, 0, 64 << 20, 1));
    ok(wm_store_trim(store));
    ok(wm_store_destroy(store));
    assert_eq!(bytes(object), b"world", "an object outlives the handle of its connection");
    ok(wm_store_object_destroy(object));
    fails(wm_store_object_destroy(object), WM_ERROR_INVALID_HANDLE);
}

#[test]
fn arrays_have_shape_and_type_and_other_objects_have_metadata() {
    let served = TestStore::start();
    let store = connect(&served);
    let shape = [2_u64, 3];
    let array = wm_store_object_options_t {
        is_array: 1,
        dtype: WM_DTYPE_F32,
        shape: shape.as_ptr(),
        dimensions: 2,
        ..options()
    };
    let values = [1.5_f32; 6];
    let put = |name: &CStr, len, options: &wm_store_object_options_t| {
        // SAFETY: the pointers are valid, and `len` is at most the length of the values.
        unsafe { wm_store_put(store, name.as_ptr(), values.as_ptr().cast(), len, options, ptr::null_mut()) }
    };
    ok(put(c"array", 24, &array));
    fails(put(c"array", 20, &array), WM_ERROR_INVALID_ARGUMENT);
    let mut found = entry();
    // SAFETY: the pointers are valid, and the structure has the size in its first field.
    ok(unsafe { wm_store_stat(store, c"array".as_ptr(), &raw mut found) });
    assert_eq!(
        (found.is_array, found.dtype, found.dimensions, &found.shape[..3]),
        (1, WM_DTYPE_F32, 2, &[2, 3, 0][..])
    );
    assert_eq!(&found.meta[..found.meta_len as usize], br#"{"dtype":"F32","shape":[2,3]}"#);
    let meta = wm_store_object_options_t { meta: b"mine".as_ptr().cast(), meta_len: 4, ..options() };
    ok(put(c"meta", 24, &meta));
    // SAFETY: the pointers are valid, and the structure has the size in its first field.
    ok(unsafe { wm_store_stat(store, c"meta".as_ptr(), &raw mut found) });
    assert_eq!(
        (found.is_array, found.dimensions, &found.meta[..found.meta_len as usize]),
        (0, 0, &b"mine"[..])
    );
    fails(put(c"both", 24, &wm_store_object_options_t { is_array: 1, ..meta }), WM_ERROR_INVALID_ARGUMENT);
    // SAFETY: the text and the range are valid.
    ok(unsafe {
        wm_store_publish(store, c"part".as_ptr(), found.id, 4, 8, b"p".as_ptr().cast(), 1, ptr::null_mut())
    });
    let part = get(store, c"part", 0);
    assert_eq!(bytes(part), [1.5_f32; 2].map(f32::to_ne_bytes).concat());
    // SAFETY: the pointer is valid, and the structure has the size in its first field.
    ok(unsafe { wm_store_object_entry(part, &raw mut found) });
    assert_eq!((text(&found.name).as_str(), found.meta[0]), ("part", b'p'));
    ok(wm_store_object_destroy(part));
    ok(wm_store_destroy(store));
}

#[test]
fn drafts_are_written_in_place_sealed_once_and_abandoned() {
    let served = TestStore::start();
    let store = connect(&served);
    for len in [10_u64, 2 << 20] {
        let (mut draft, mut address, mut data_len) = (zeroed(), ptr::null_mut::<c_void>(), 0);
        // SAFETY: the pointers are valid.
        ok(unsafe { wm_store_draft_create(store, c"draft".as_ptr(), len, ptr::null(), &raw mut draft) });
        // SAFETY: the pointers are valid.
        ok(unsafe { wm_store_draft_write(draft, 0, 2, b"cd".as_ptr().cast(), 2) });
        // SAFETY: the pointers are valid.
        let status = unsafe { wm_store_draft_write(draft, 0, len - 1, b"cd".as_ptr().cast(), 2) };
        fails(status, WM_ERROR_STORE_OUT_OF_RANGE);
        // SAFETY: the pointers are valid.
        fails(unsafe { wm_store_draft_write(draft, 1, 0, ptr::null(), 0) }, WM_ERROR_INVALID_ARGUMENT);
        // SAFETY: the pointers are valid.
        ok(unsafe { wm_store_draft_data(draft, 0, &raw mut address, &raw mut data_len) });
        assert_eq!(data_len, len);
        // SAFETY: the draft has at least two bytes at the address.
        unsafe { address.cast::<[u8; 2]>().write(*b"ab") };
        let mut sealed = zeroed();
        // SAFETY: the pointer is valid.
        ok(unsafe { wm_store_draft_seal(draft, &raw mut sealed) });
        // SAFETY: the pointer may be null.
        fails(unsafe { wm_store_draft_seal(draft, ptr::null_mut()) }, WM_ERROR_STORE_NOTHING_TO_SEAL);
        // SAFETY: the pointers are valid.
        let status = unsafe { wm_store_draft_write(draft, 0, 0, b"x".as_ptr().cast(), 1) };
        fails(status, WM_ERROR_STORE_NOTHING_TO_SEAL);
        ok(wm_store_draft_destroy(draft));
        let mut object = zeroed();
        // SAFETY: the pointer is valid.
        ok(unsafe { wm_store_get_by_id(store, sealed.id, &raw mut object) });
        assert_eq!(&bytes(object)[..5], b"abcd\0");
        ok(wm_store_object_destroy(object));
    }
    let (mut draft, mut list, mut count) = (zeroed(), zeroed(), 0);
    // SAFETY: the pointers are valid.
    ok(unsafe { wm_store_draft_create(store, c"gone".as_ptr(), 2 << 20, ptr::null(), &raw mut draft) });
    // SAFETY: the pointers are valid.
    ok(unsafe { wm_store_list(store, ptr::null(), 1, &raw mut list) });
    // SAFETY: the pointer is valid.
    ok(unsafe { wm_store_list_count(list, &raw mut count) });
    assert_eq!(count, 1);
    ok(wm_store_list_destroy(list));
    ok(wm_store_draft_destroy(draft));
    // SAFETY: the pointers are valid.
    let status = unsafe { wm_store_get(store, c"gone".as_ptr(), 0, &mut zeroed()) };
    fails(status, WM_ERROR_STORE_NO_SUCH_NAME);
    // SAFETY: the pointers are valid.
    let status =
        unsafe { wm_store_draft_create(store, c"long".as_ptr(), 1 << 40, ptr::null(), &raw mut draft) };
    fails(status, WM_ERROR_STORE_OVER_QUOTA);
    ok(wm_store_destroy(store));
}

#[test]
fn the_objects_of_a_pack_are_sealed_together() {
    let served = TestStore::start();
    let store = connect(&served);
    for long in [8_u64, 2 << 20] {
        let (mut pack, mut draft) = (zeroed(), zeroed());
        // SAFETY: the pointers are valid.
        ok(unsafe { wm_store_pack_create(c"pack".as_ptr(), ptr::null(), &raw mut pack) });
        for (name, len) in [(c"pack/b", 4), (c"pack/a", long)] {
            // SAFETY: the pointers are valid.
            ok(unsafe { wm_store_pack_add(pack, name.as_ptr(), len, ptr::null()) });
        }
        // SAFETY: the pointer is valid.
        ok(unsafe { wm_store_draft_create_pack(store, pack, &raw mut draft) });
        ok(wm_store_pack_destroy(pack));
        // SAFETY: the pointers are valid.
        ok(unsafe { wm_store_draft_write(draft, 0, 0, b"bbbb".as_ptr().cast(), 4) });
        // SAFETY: the pointers are valid.
        ok(unsafe { wm_store_draft_write(draft, 1, 2, b"aa".as_ptr().cast(), 2) });
        // SAFETY: the pointer may be null.
        ok(unsafe { wm_store_draft_seal(draft, ptr::null_mut()) });
        ok(wm_store_draft_destroy(draft));
        let (object, mut count, mut member) = (get(store, c"pack", 0), 0, entry());
        // SAFETY: the pointer is valid.
        ok(unsafe { wm_store_object_member_count(object, &raw mut count) });
        assert_eq!(count, 2);
        // SAFETY: the pointer is valid, and the structure has the size in its first field.
        ok(unsafe { wm_store_object_member(object, 0, &raw mut member) });
        assert_eq!((text(&member.name).as_str(), member.len), ("pack/a", long));
        let offset = member.offset as usize;
        assert_eq!(&bytes(object)[offset..offset + 4], b"\0\0aa");
        // SAFETY: the pointer is valid, and the structure has the size in its first field.
        fails(unsafe { wm_store_object_member(object, 2, &raw mut member) }, WM_ERROR_INVALID_ARGUMENT);
        ok(wm_store_object_destroy(object));
        let one = get(store, c"pack/b", 0);
        assert_eq!(bytes(one), b"bbbb");
        ok(wm_store_object_destroy(one));
    }
    ok(wm_store_destroy(store));
}

#[test]
fn objects_in_device_memory_have_an_address_of_the_device() {
    let served = TestStore::start();
    let mut backend = wm_backend_t { value: 0 };
    // SAFETY: the pointer is valid.
    ok(unsafe { wm_backend_open(WM_BACKEND_HOST, 0, &raw mut backend) });
    let store = served.connect(backend);
    let mut device = wm_device_t { value: 0 };
    // SAFETY: the pointer is valid.
    ok(unsafe { wm_device_open(backend, 0, &raw mut device) });
    let on_device = wm_store_object_options_t { device, ..options() };
    let (mut draft, mut address, mut len) = (zeroed(), ptr::null_mut::<c_void>(), 0);
    // SAFETY: the pointers are valid, and the structure has the size in its first field.
    ok(unsafe { wm_store_draft_create(store, c"there".as_ptr(), 100, &raw const on_device, &raw mut draft) });
    // SAFETY: the pointers are valid.
    let status = unsafe { wm_store_draft_write(draft, 0, 0, b"x".as_ptr().cast(), 1) };
    fails(status, WM_ERROR_STORE_ON_DEVICE);
    // SAFETY: the pointers are valid.
    ok(unsafe { wm_store_draft_data(draft, 0, &raw mut address, &raw mut len) });
    // SAFETY: the device is of the host backend, so the CPU can write the 100 bytes at the address.
    unsafe { address.cast::<[u8; 100]>().write([9; 100]) };
    // SAFETY: the pointer may be null.
    ok(unsafe { wm_store_draft_seal(draft, ptr::null_mut()) });
    ok(wm_store_draft_destroy(draft));
    let (object, mut found, mut found_device) = (get(store, c"there", 0), entry(), wm_device_t { value: 0 });
    assert_eq!(bytes(object), [9; 100]);
    // SAFETY: the pointer is valid, and the structure has the size in its first field.
    ok(unsafe { wm_store_object_entry(object, &raw mut found) });
    assert_eq!(found.is_host, 0);
    // SAFETY: the pointer is valid.
    ok(unsafe { wm_store_object_device(object, &raw mut found_device) });
    // SAFETY: the pointers are valid, and the structure has the size in its first field.
    let status =
        unsafe { wm_store_put(store, c"x".as_ptr(), ptr::null(), 0, &raw const on_device, ptr::null_mut()) };
    fails(status, WM_ERROR_INVALID_ARGUMENT);
    ok(wm_device_destroy(found_device));
    ok(wm_store_object_destroy(object));
    ok(wm_device_destroy(device));
    ok(wm_backend_destroy(backend));
    ok(wm_store_destroy(store));
}

fn event() -> wm_store_event_t {
    wm_store_event_t { struct_size: size_of::<wm_store_event_t>(), ..zeroed() }
}

#[test]
fn a_watch_gets_events_and_ends_when_it_is_freed() {
    let served = TestStore::start();
    let store = connect(&served);
    let (mut watch, mut next) = (wm_store_watch_t { value: 0 }, event());
    // SAFETY: the pointers are valid.
    ok(unsafe { wm_store_watch(store, c"w/".as_ptr(), &raw mut watch) });
    put(store, c"other", b"");
    let sealed = put(store, c"w/seen", b"1");
    let replacing = put(store, c"w/seen", b"2");
    ok(wm_store_delete(store, replacing.id));
    // SAFETY: the pointer is valid, and the structure has the size in its first field.
    ok(unsafe { wm_store_watch_next(watch, 60 * SECOND, &raw mut next) });
    assert_eq!(
        (text(&next.name).as_str(), next.kind, next.id, next.version),
        ("w/seen", WM_STORE_EVENT_PUBLISHED, sealed.id, 1)
    );
    // SAFETY: the pointer is valid, and the structure has the size in its first field.
    ok(unsafe { wm_store_watch_next(watch, 60 * SECOND, &raw mut next) });
    let first = next.revision;
    let summary = |next: &wm_store_event_t| (next.kind, next.id, next.version, next.previous, next.objects);
    let rest =
        [(WM_STORE_EVENT_REPLACED, replacing.id, 2, 1, 1), (WM_STORE_EVENT_DELETED, replacing.id, 2, 0, 1)];
    assert_eq!(summary(&next), rest[0]);
    // SAFETY: the pointer is valid, and the structure has the size in its first field.
    ok(unsafe { wm_store_watch_next(watch, 60 * SECOND, &raw mut next) });
    assert_eq!(summary(&next), rest[1]);
    let mut later = wm_store_watch_t { value: 0 };
    // SAFETY: the pointers are valid.
    ok(unsafe { wm_store_watch_after(store, c"w/".as_ptr(), first - 1, &raw mut later) });
    for expected in rest {
        // SAFETY: the pointer is valid, and the structure has the size in its first field.
        ok(unsafe { wm_store_watch_next(later, 60 * SECOND, &raw mut next) });
        assert_eq!(summary(&next), expected);
    }
    ok(wm_store_watch_destroy(later));
    // SAFETY: the pointer is valid, and the structure has the size in its first field.
    fails(unsafe { wm_store_watch_next(watch, 1, &raw mut next) }, WM_ERROR_STORE_TIMED_OUT);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            let mut next = event();
            // SAFETY: the pointer is valid, and the structure has the size in its first field.
            unsafe { wm_store_watch_next(watch, 600 * SECOND, &raw mut next) }
        });
        ok(wm_store_watch_destroy(watch));
        // The thread may begin its call before or after the watch is freed.
        let status = waiting.join().unwrap();
        assert!([WM_ERROR_INTERRUPTED, WM_ERROR_INVALID_HANDLE].contains(&status), "{status}");
    });
    ok(wm_store_destroy(store));
}

#[test]
fn a_get_waits_for_a_name_until_its_timeout() {
    let served = TestStore::start();
    let (store, other) = (connect(&served), connect(&served));
    // SAFETY: the pointers are valid.
    let status = unsafe { wm_store_get(store, c"late".as_ptr(), SECOND / 1000, &mut zeroed()) };
    fails(status, WM_ERROR_STORE_NO_SUCH_NAME);
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| bytes(get(store, c"late", 60 * SECOND)));
        put(other, c"late", b"now");
        assert_eq!(waiting.join().unwrap(), b"now");
    });
    ok(wm_store_destroy(store));
    ok(wm_store_destroy(other));
}

#[test]
fn a_store_that_is_not_served_and_invalid_arguments_are_statuses() {
    let served = TestStore::start();
    let mut store = wm_store_t { value: 0 };
    let nowhere = CString::new(served.folder().join("none").to_str().unwrap()).unwrap();
    // SAFETY: the pointers are valid.
    let status = unsafe { wm_store_connect(nowhere.as_ptr(), ptr::null(), &raw mut store) };
    fails(status, WM_ERROR_STORE_NOT_SERVED);
    let store = connect(&served);
    // SAFETY: the pointers are valid or null.
    let status = unsafe { wm_store_put(store, ptr::null(), ptr::null(), 0, ptr::null(), ptr::null_mut()) };
    fails(status, WM_ERROR_NULL_POINTER);
    let long = CString::new("x".repeat(201)).unwrap();
    // SAFETY: the pointers are valid or null.
    let status = unsafe { wm_store_put(store, long.as_ptr(), ptr::null(), 0, ptr::null(), ptr::null_mut()) };
    fails(status, WM_ERROR_STORE_NAME_TOO_LONG);
    let longest = CString::new("x".repeat(200)).unwrap();
    put(store, &longest, b"");
    let mut found = entry();
    // SAFETY: the pointers are valid, and the structure has the size in its first field.
    ok(unsafe { wm_store_stat(store, longest.as_ptr(), &raw mut found) });
    assert_eq!(text(&found.name).len(), 200);
    ok(wm_store_destroy(store));
    fails(wm_store_trim(store), WM_ERROR_INVALID_HANDLE);
}

#[test]
fn a_forked_child_gets_an_error_and_can_connect() {
    let served = TestStore::start();
    let store = connect(&served);
    let (mut draft, mut watch) = (zeroed(), zeroed());
    // SAFETY: the pointers are valid.
    ok(unsafe { wm_store_draft_create(store, c"draft".as_ptr(), 10, ptr::null(), &raw mut draft) });
    // SAFETY: the pointers are valid.
    ok(unsafe { wm_store_watch(store, ptr::null(), &raw mut watch) });
    put(store, c"held", b"bytes");
    let object = get(store, c"held", 0);
    in_forked_child(|| {
        // SAFETY: the pointers are valid or null.
        let status =
            unsafe { wm_store_put(store, c"x".as_ptr(), ptr::null(), 0, ptr::null(), ptr::null_mut()) };
        fails(status, WM_ERROR_FORKED);
        // SAFETY: the pointer may be null.
        fails(unsafe { wm_store_draft_seal(draft, ptr::null_mut()) }, WM_ERROR_FORKED);
        // SAFETY: the pointer is valid, and the structure has the size in its first field.
        fails(unsafe { wm_store_watch_next(watch, 1, &mut event()) }, WM_ERROR_FORKED);
        let (mut address, mut len) = (ptr::null(), 0);
        // SAFETY: the pointers are valid.
        fails(unsafe { wm_store_object_data(object, &raw mut address, &raw mut len) }, WM_ERROR_FORKED);
        let own = connect(&served);
        put(own, c"child", b"1");
        ok(wm_store_destroy(own));
    });
    // SAFETY: the pointer may be null.
    ok(unsafe { wm_store_draft_seal(draft, ptr::null_mut()) });
    let child = get(store, c"child", 0);
    for object in [object, child] {
        ok(wm_store_object_destroy(object));
    }
    ok(wm_store_draft_destroy(draft));
    ok(wm_store_watch_destroy(watch));
    ok(wm_store_destroy(store));
}
