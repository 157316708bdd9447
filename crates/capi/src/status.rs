//! The statuses that calls return: the numbers of the errors of the crates below, and those of errors that only C has.

use std::ffi::{CStr, c_char};

/// The result of a call: `WM_OK`, or the number of an error, which is the same in Rust, in Python and between processes. Later versions
/// may return numbers that this header does not have.
pub type wm_status_t = u32;

/// The call succeeded.
pub const WM_OK: wm_status_t = 0;

/// The length of memory, a reservation or a copy is zero.
pub const WM_ERROR_ZERO_LENGTH: wm_status_t = 1;
/// A length is not a multiple of the granule, the allocation unit of the device.
pub const WM_ERROR_UNALIGNED_LENGTH: wm_status_t = 2;
/// An offset or an address is not a multiple of the granule, the allocation unit of the device.
pub const WM_ERROR_UNALIGNED_OFFSET: wm_status_t = 3;
/// A requested alignment is not a power of two.
pub const WM_ERROR_BAD_ALIGNMENT: wm_status_t = 4;
/// A mapping would extend past the end of its reservation (a range of addresses).
pub const WM_ERROR_BEYOND_RESERVATION: wm_status_t = 5;
/// Another mapping occupies part of the range to map.
pub const WM_ERROR_OCCUPIED: wm_status_t = 6;
/// The backend has no device with the requested number.
pub const WM_ERROR_NO_SUCH_DEVICE: wm_status_t = 7;
/// The operands of an operation belong to different backends, or to different openings of one backend.
pub const WM_ERROR_WRONG_BACKEND: wm_status_t = 8;
/// A device lacks the access rights that the operation needs.
pub const WM_ERROR_DENIED: wm_status_t = 9;
/// Write access was requested to memory that was imported through a read-only handle.
pub const WM_ERROR_READ_ONLY_HANDLE: wm_status_t = 10;
/// The range to access is not inside the memory.
pub const WM_ERROR_OUTSIDE_MEMORY: wm_status_t = 11;
/// The source and the destination of a copy have different lengths.
pub const WM_ERROR_LENGTHS_DIFFER: wm_status_t = 12;
/// The source and the destination of a copy overlap.
pub const WM_ERROR_COPY_OVERLAP: wm_status_t = 13;
/// The CPU cannot address the memory of a device.
pub const WM_ERROR_NOT_HOST_VISIBLE: wm_status_t = 14;
/// A resource cannot be released explicitly because other references to it exist.
pub const WM_ERROR_IN_USE: wm_status_t = 15;
/// An operation is not possible while its stream is being captured.
pub const WM_ERROR_CAPTURING: wm_status_t = 16;
/// A kernel module has no kernel of the requested name for its backend.
pub const WM_ERROR_NO_SUCH_FUNCTION: wm_status_t = 17;
/// A forked child used an object that it inherited: only the process that created an object may use it.
pub const WM_ERROR_FORKED: wm_status_t = 18;
/// The deadline of a wait for a stream or an event passed before the wait ended.
pub const WM_ERROR_TIMED_OUT: wm_status_t = 19;
/// A device or a backend does not support the operation.
pub const WM_ERROR_UNSUPPORTED: wm_status_t = 20;
/// A backend cannot be opened on this machine.
pub const WM_ERROR_UNAVAILABLE: wm_status_t = 21;
/// A configuration value is invalid.
pub const WM_ERROR_BAD_CONFIG: wm_status_t = 22;
/// A handle was requested that would grant no access rights.
pub const WM_ERROR_NO_RIGHTS: wm_status_t = 23;
/// The time between two events was requested before both were recorded and completed.
pub const WM_ERROR_NOT_REACHED: wm_status_t = 24;
/// An operand of one device was used on a stream of another device.
pub const WM_ERROR_WRONG_DEVICE: wm_status_t = 25;
/// Two spans to be joined are not contiguous.
pub const WM_ERROR_GAP: wm_status_t = 26;
/// A graph cannot be launched because memory that its work uses was freed after the capture.
pub const WM_ERROR_FREED: wm_status_t = 27;
/// A system call on memory failed.
pub const WM_ERROR_SYSTEM_CALL: wm_status_t = 100;
/// A descriptor from another process is not one of a memory file.
pub const WM_ERROR_NOT_A_MEMFD: wm_status_t = 101;
/// A memory file from another process is not sealed against resizing.
pub const WM_ERROR_UNSEALED: wm_status_t = 102;
/// A memory file from another process has another length than announced.
pub const WM_ERROR_WRONG_LENGTH: wm_status_t = 103;
/// An object of the operating system failed otherwise.
pub const WM_ERROR_OPERATING_SYSTEM: wm_status_t = 104;
/// Less memory is available than was requested.
pub const WM_ERROR_OUT_OF_MEMORY: wm_status_t = 105;
/// A call of the CUDA driver failed.
pub const WM_ERROR_DRIVER: wm_status_t = 106;
/// Ranks made different collective calls, or passed different arguments.
pub const WM_ERROR_RANKS_DISAGREE: wm_status_t = 1001;
/// A group or a partition of rows has no ranks.
pub const WM_ERROR_NO_RANKS: wm_status_t = 1002;
/// The numbers of rows in a specification are for another number of ranks than the group has.
pub const WM_ERROR_RANKS_DIFFER: wm_status_t = 1003;
/// A memory or partition has more rows than signed 64-bit indices can address.
pub const WM_ERROR_TOO_MANY_ROWS: wm_status_t = 1004;
/// A memory or tensor has rows of no bytes.
pub const WM_ERROR_EMPTY_ROW: wm_status_t = 1005;
/// A memory is longer than an address space.
pub const WM_ERROR_MEMORY_TOO_LONG: wm_status_t = 1006;
/// The shape of a tensor has no dimensions.
pub const WM_ERROR_NO_DIMENSIONS: wm_status_t = 1007;
/// A range of rows or columns is not within the tensor.
pub const WM_ERROR_ROWS_OUT_OF_RANGE: wm_status_t = 1008;
/// No range of addresses of the requested length was free on all ranks.
pub const WM_ERROR_NO_COMMON_ADDRESS: wm_status_t = 1009;
/// An index names no row of the table: it is negative, or not below the number of rows.
pub const WM_ERROR_BAD_INDEX: wm_status_t = 1010;
/// The rows have another element type than the table, and no conversion was requested.
pub const WM_ERROR_TYPES_DIFFER: wm_status_t = 1011;
/// Elements cannot be converted, because only floats convert to floats, and integers to integers.
pub const WM_ERROR_NOT_CONVERTIBLE: wm_status_t = 1012;
/// The memory of an operand is shorter than its rows, indices or elements.
pub const WM_ERROR_TOO_SHORT: wm_status_t = 1013;
/// The stride between rows is shorter than a row, so the rows overlap.
pub const WM_ERROR_STRIDE_TOO_SHORT: wm_status_t = 1014;
/// An operand's address or stride is not aligned to its elements or indices.
pub const WM_ERROR_MISALIGNED: wm_status_t = 1015;
/// The numbers of rows that a specification gives to the ranks do not add up to the rows of the memory.
pub const WM_ERROR_ROWS_DIFFER: wm_status_t = 1016;
/// A tensor file is invalid or cannot be accessed.
pub const WM_ERROR_FILE: wm_status_t = 1017;
/// The call was interrupted, for example by its progress callback.
pub const WM_ERROR_INTERRUPTED: wm_status_t = 1018;
/// The element type does not support the reduction operation.
pub const WM_ERROR_OP_NOT_FOR_TYPE: wm_status_t = 1019;
/// The input and the output of a call overlap without being the same buffer.
pub const WM_ERROR_OVERLAP: wm_status_t = 1020;
/// The requested lane (sequence of collective calls) does not exist.
pub const WM_ERROR_NO_SUCH_LANE: wm_status_t = 1021;
/// The collective kernels of the ranks on one device cannot be resident at the same time, so they would deadlock.
pub const WM_ERROR_NOT_RESIDENT: wm_status_t = 1022;
/// The window (memory of all ranks) that was passed to a collective call belongs to another group of ranks.
pub const WM_ERROR_FOREIGN_WINDOW: wm_status_t = 1023;
/// A window would have no bytes on any rank.
pub const WM_ERROR_EMPTY_WINDOW: wm_status_t = 1024;
/// The requested bytes are not within a rank's part of a window.
pub const WM_ERROR_NO_PART: wm_status_t = 1025;
/// The reserved addresses have no free range that is long enough for a window.
pub const WM_ERROR_NO_WINDOW_SPACE: wm_status_t = 1026;
/// An environment variable is missing, invalid, or contradicts another one.
pub const WM_ERROR_ENVIRONMENT: wm_status_t = 1027;
/// A rank opened another save, or another version of a file, than rank 0.
pub const WM_ERROR_SAVES_DIFFER: wm_status_t = 1029;
/// A system call failed.
pub const WM_ERROR_OS: wm_status_t = 1030;
/// A slice has more or fewer elements than the rows to read or write.
pub const WM_ERROR_COUNT_DIFFERS: wm_status_t = 1031;
/// A slice ends within a row.
pub const WM_ERROR_PARTIAL_ROW: wm_status_t = 1032;
/// The memory of captured calls is recorded already.
pub const WM_ERROR_RECORDING: wm_status_t = 1040;
/// A rank died: its process exited, or its progress thread ended, without closing the communicator.
pub const WM_ERROR_PEER_LOST: wm_status_t = 1100;
/// The timeout expired before all ranks took part: ranks are stopped, slow, elsewhere in their program, or not started.
pub const WM_ERROR_TIMEOUT: wm_status_t = 1101;
/// A rank aborted the communicator.
pub const WM_ERROR_ABORTED: wm_status_t = 1102;
/// A rank has destroyed its communicator, and takes part in no later operation.
pub const WM_ERROR_PEER_LEFT: wm_status_t = 1103;
/// This rank has closed the communicator.
pub const WM_ERROR_CLOSED: wm_status_t = 1104;
/// An earlier operation timed out, so the ranks are no longer synchronised and the communicator is unusable.
pub const WM_ERROR_POISONED: wm_status_t = 1105;
/// A rank violated the protocol between ranks, or runs another version of wholemem.
pub const WM_ERROR_PROTOCOL: wm_status_t = 1106;
/// Another process has already joined the group as this rank.
pub const WM_ERROR_RANK_TAKEN: wm_status_t = 1107;
/// The ranks were started with different group sizes.
pub const WM_ERROR_SIZE_DIFFERS: wm_status_t = 1108;
/// This process is in another network namespace than the process that created the unique id, and the unique id contains no socket directory.
pub const WM_ERROR_OTHER_NAMESPACE: wm_status_t = 1109;
/// The directory for sockets does not exist, has an unusable path, or is accessible to other users.
pub const WM_ERROR_SOCKET_DIR: wm_status_t = 1110;
/// The requested rank is not less than the number of ranks in the group.
pub const WM_ERROR_NO_SUCH_RANK: wm_status_t = 1111;
/// The requested group has too many ranks.
pub const WM_ERROR_TOO_MANY_RANKS: wm_status_t = 1112;
/// The number of entries of an all-to-all exchange does not fit the number of ranks.
pub const WM_ERROR_WRONG_COUNT: wm_status_t = 1113;
/// A payload is too long for one collective operation.
pub const WM_ERROR_MESSAGE_TOO_LONG: wm_status_t = 1114;
/// Another thread of this process is in an operation of the communicator.
pub const WM_ERROR_BUSY: wm_status_t = 1115;
/// A text is not a valid unique id.
pub const WM_ERROR_BAD_ID: wm_status_t = 1116;
/// The environment describes ranks on several nodes, but lacks the address of rank 0 or the secret, or contains invalid ones.
pub const WM_ERROR_DISCOVERY: wm_status_t = 1117;
/// A rank could not receive all file descriptors in an exchange of descriptors.
pub const WM_ERROR_DESCRIPTORS: wm_status_t = 1118;
/// The ranks of the group are on several nodes, and the call needs ranks of one node.
pub const WM_ERROR_ACROSS_NODES: wm_status_t = 1119;
/// The unique id of a group on several nodes has no secret.
pub const WM_ERROR_NO_SECRET: wm_status_t = 1120;
/// A node, or a rank of it, did not answer in the time after which silent nodes are given up.
pub const WM_ERROR_NODE_TIMEOUT: wm_status_t = 1121;
/// No server of a store listens at the socket.
pub const WM_ERROR_STORE_NOT_SERVED: wm_status_t = 2000;
/// The caller gives no socket of a store, and the folder of the default socket does not exist.
pub const WM_ERROR_STORE_NO_SOCKET: wm_status_t = 2001;
/// Another server already listens at the socket of the store.
pub const WM_ERROR_STORE_ALREADY_SERVED: wm_status_t = 2002;
/// The path for the socket of the store is an existing file that is not a socket.
pub const WM_ERROR_STORE_NOT_A_SOCKET: wm_status_t = 2003;
/// The socket of the store could not be created or connected to.
pub const WM_ERROR_STORE_SOCKET: wm_status_t = 2004;
/// The deadline of a request passed before the server of the store answered.
pub const WM_ERROR_STORE_TIMED_OUT: wm_status_t = 2005;
/// The server of the store has closed the connection, or the store has ended.
pub const WM_ERROR_STORE_DISCONNECTED: wm_status_t = 2006;
/// The server that sent the events of a watch was replaced.
pub const WM_ERROR_STORE_EVENTS_MISSED: wm_status_t = 2007;
/// The server of the store sent a message that violates the protocol.
pub const WM_ERROR_STORE_PROTOCOL: wm_status_t = 2008;
/// The client holds the maximum number of objects: all its pins are in use.
pub const WM_ERROR_STORE_TOO_MANY_PINS: wm_status_t = 2009;
/// The name of an object is empty, although the operation requires a name.
pub const WM_ERROR_STORE_EMPTY_NAME: wm_status_t = 2010;
/// A range to be written or mapped exceeds the length of the object.
pub const WM_ERROR_STORE_OUT_OF_RANGE: wm_status_t = 2011;
/// The object is in device memory, which the CPU cannot access directly.
pub const WM_ERROR_STORE_ON_DEVICE: wm_status_t = 2012;
/// The device of an object is not visible to both this process and the server of the store.
pub const WM_ERROR_STORE_DEVICE_HIDDEN: wm_status_t = 2013;
/// The index of the store (the table of all objects) has an unknown layout or is damaged.
pub const WM_ERROR_STORE_INDEX: wm_status_t = 2014;
/// A process or a thread of the store could not be started.
pub const WM_ERROR_STORE_LAUNCH: wm_status_t = 2015;
/// The server of the store exited before it was ready for clients.
pub const WM_ERROR_STORE_NEVER_SERVED: wm_status_t = 2016;
/// A hand-over of descriptors between the keeper and the server of a store lacks a descriptor.
pub const WM_ERROR_STORE_INCOMPLETE: wm_status_t = 2017;
/// No object of the store has this id, or the object was deleted.
pub const WM_ERROR_STORE_NO_SUCH_OBJECT: wm_status_t = 2100;
/// No object had the requested name before the timeout.
pub const WM_ERROR_STORE_NO_SUCH_NAME: wm_status_t = 2101;
/// The object is not sealed yet: its creator may still write it.
pub const WM_ERROR_STORE_NOT_SEALED: wm_status_t = 2102;
/// The object was created by another user, so this client may not delete it.
pub const WM_ERROR_STORE_NOT_YOURS: wm_status_t = 2103;
/// The client has no unsealed object that the given request created.
pub const WM_ERROR_STORE_NOTHING_TO_SEAL: wm_status_t = 2104;
/// The object is still mapped for writing, by this process or by another one that received the object's memory.
pub const WM_ERROR_STORE_STILL_MAPPED: wm_status_t = 2105;
/// The name of an object, or a prefix of names, exceeds the maximum length.
pub const WM_ERROR_STORE_NAME_TOO_LONG: wm_status_t = 2106;
/// The metadata of an object exceeds the maximum length.
pub const WM_ERROR_STORE_META_TOO_LONG: wm_status_t = 2107;
/// A pack (several objects in one memory) has too many objects.
pub const WM_ERROR_STORE_TOO_MANY_MEMBERS: wm_status_t = 2108;
/// The requested memory would exceed the memory quota of the store.
pub const WM_ERROR_STORE_OVER_QUOTA: wm_status_t = 2109;
/// The index (the table of all objects) has no free slot for another object or another allocation.
pub const WM_ERROR_STORE_INDEX_FULL: wm_status_t = 2110;
/// The server of the store has no device with the requested number.
pub const WM_ERROR_STORE_NO_SUCH_DEVICE: wm_status_t = 2111;
/// The memory of an object could not be allocated, sealed or opened.
pub const WM_ERROR_STORE_NO_MEMORY: wm_status_t = 2112;
/// The server cannot create an object from the existing memory that a client offers.
pub const WM_ERROR_STORE_CANNOT_ADOPT: wm_status_t = 2113;
/// The server adopts memory (uses it for an object) only from clients of the server's own user.
pub const WM_ERROR_STORE_NOT_TRUSTED: wm_status_t = 2114;
/// A range of bytes exceeds the memory that the request refers to.
pub const WM_ERROR_STORE_OUTSIDE_MEMORY: wm_status_t = 2115;
/// The client has too many requests that the server has not answered.
pub const WM_ERROR_STORE_TOO_MANY_WAITING: wm_status_t = 2116;
/// The protocol version of the client is not supported by the server.
pub const WM_ERROR_STORE_OTHER_PROTOCOL: wm_status_t = 2117;
/// The server has reached its limit of open file descriptors.
pub const WM_ERROR_STORE_NO_DESCRIPTORS: wm_status_t = 2118;
/// An object of another user already has the requested name.
pub const WM_ERROR_STORE_NAME_TAKEN: wm_status_t = 2119;
/// The request of a client violates the protocol.
pub const WM_ERROR_STORE_MALFORMED: wm_status_t = 2120;
/// The request would exceed the limit on memory or descriptors that the server holds for one client or for one user.
pub const WM_ERROR_STORE_CLIENT_LIMIT: wm_status_t = 2121;
/// Servers died while the request was in progress, so the current server does not execute the request.
pub const WM_ERROR_STORE_SERVERS_DIED: wm_status_t = 2122;
/// A handle is zero, was freed, is of another kind, or was created by another process.
pub const WM_ERROR_INVALID_HANDLE: wm_status_t = 3000;
/// A pointer is null that must not be, or is not aligned to its type.
pub const WM_ERROR_NULL_POINTER: wm_status_t = 3001;
/// An argument has a value that does not exist or is out of range.
pub const WM_ERROR_INVALID_ARGUMENT: wm_status_t = 3002;
/// The library violated an invariant of its own: a defect of the library.
pub const WM_ERROR_PANIC: wm_status_t = 3003;
/// The program was compiled with a header that this library does not support.
pub const WM_ERROR_VERSION_MISMATCH: wm_status_t = 3004;
/// The process has as many handles as it can have, or too many calls use one at the same time.
pub const WM_ERROR_TOO_MANY_HANDLES: wm_status_t = 3005;

/// Lists statuses with their names.
macro_rules! names {
    ($($name:ident,)*) => {
        &[$(($name, match CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
            Ok(name) => name,
            Err(_) => panic!("a name has a NUL"),
        }),)*]
    };
}

/// All statuses, in ascending order.
const NAMES: &[(wm_status_t, &CStr)] = names![
    WM_OK,
    WM_ERROR_ZERO_LENGTH,
    WM_ERROR_UNALIGNED_LENGTH,
    WM_ERROR_UNALIGNED_OFFSET,
    WM_ERROR_BAD_ALIGNMENT,
    WM_ERROR_BEYOND_RESERVATION,
    WM_ERROR_OCCUPIED,
    WM_ERROR_NO_SUCH_DEVICE,
    WM_ERROR_WRONG_BACKEND,
    WM_ERROR_DENIED,
    WM_ERROR_READ_ONLY_HANDLE,
    WM_ERROR_OUTSIDE_MEMORY,
    WM_ERROR_LENGTHS_DIFFER,
    WM_ERROR_COPY_OVERLAP,
    WM_ERROR_NOT_HOST_VISIBLE,
    WM_ERROR_IN_USE,
    WM_ERROR_CAPTURING,
    WM_ERROR_NO_SUCH_FUNCTION,
    WM_ERROR_FORKED,
    WM_ERROR_TIMED_OUT,
    WM_ERROR_UNSUPPORTED,
    WM_ERROR_UNAVAILABLE,
    WM_ERROR_BAD_CONFIG,
    WM_ERROR_NO_RIGHTS,
    WM_ERROR_NOT_REACHED,
    WM_ERROR_WRONG_DEVICE,
    WM_ERROR_GAP,
    WM_ERROR_FREED,
    WM_ERROR_SYSTEM_CALL,
    WM_ERROR_NOT_A_MEMFD,
    WM_ERROR_UNSEALED,
    WM_ERROR_WRONG_LENGTH,
    WM_ERROR_OPERATING_SYSTEM,
    WM_ERROR_OUT_OF_MEMORY,
    WM_ERROR_DRIVER,
    WM_ERROR_RANKS_DISAGREE,
    WM_ERROR_NO_RANKS,
    WM_ERROR_RANKS_DIFFER,
    WM_ERROR_TOO_MANY_ROWS,
    WM_ERROR_EMPTY_ROW,
    WM_ERROR_MEMORY_TOO_LONG,
    WM_ERROR_NO_DIMENSIONS,
    WM_ERROR_ROWS_OUT_OF_RANGE,
    WM_ERROR_NO_COMMON_ADDRESS,
    WM_ERROR_BAD_INDEX,
    WM_ERROR_TYPES_DIFFER,
    WM_ERROR_NOT_CONVERTIBLE,
    WM_ERROR_TOO_SHORT,
    WM_ERROR_STRIDE_TOO_SHORT,
    WM_ERROR_MISALIGNED,
    WM_ERROR_ROWS_DIFFER,
    WM_ERROR_FILE,
    WM_ERROR_INTERRUPTED,
    WM_ERROR_OP_NOT_FOR_TYPE,
    WM_ERROR_OVERLAP,
    WM_ERROR_NO_SUCH_LANE,
    WM_ERROR_NOT_RESIDENT,
    WM_ERROR_FOREIGN_WINDOW,
    WM_ERROR_EMPTY_WINDOW,
    WM_ERROR_NO_PART,
    WM_ERROR_NO_WINDOW_SPACE,
    WM_ERROR_ENVIRONMENT,
    WM_ERROR_SAVES_DIFFER,
    WM_ERROR_OS,
    WM_ERROR_COUNT_DIFFERS,
    WM_ERROR_PARTIAL_ROW,
    WM_ERROR_RECORDING,
    WM_ERROR_PEER_LOST,
    WM_ERROR_TIMEOUT,
    WM_ERROR_ABORTED,
    WM_ERROR_PEER_LEFT,
    WM_ERROR_CLOSED,
    WM_ERROR_POISONED,
    WM_ERROR_PROTOCOL,
    WM_ERROR_RANK_TAKEN,
    WM_ERROR_SIZE_DIFFERS,
    WM_ERROR_OTHER_NAMESPACE,
    WM_ERROR_SOCKET_DIR,
    WM_ERROR_NO_SUCH_RANK,
    WM_ERROR_TOO_MANY_RANKS,
    WM_ERROR_WRONG_COUNT,
    WM_ERROR_MESSAGE_TOO_LONG,
    WM_ERROR_BUSY,
    WM_ERROR_BAD_ID,
    WM_ERROR_DISCOVERY,
    WM_ERROR_DESCRIPTORS,
    WM_ERROR_ACROSS_NODES,
    WM_ERROR_NO_SECRET,
    WM_ERROR_NODE_TIMEOUT,
    WM_ERROR_STORE_NOT_SERVED,
    WM_ERROR_STORE_NO_SOCKET,
    WM_ERROR_STORE_ALREADY_SERVED,
    WM_ERROR_STORE_NOT_A_SOCKET,
    WM_ERROR_STORE_SOCKET,
    WM_ERROR_STORE_TIMED_OUT,
    WM_ERROR_STORE_DISCONNECTED,
    WM_ERROR_STORE_EVENTS_MISSED,
    WM_ERROR_STORE_PROTOCOL,
    WM_ERROR_STORE_TOO_MANY_PINS,
    WM_ERROR_STORE_EMPTY_NAME,
    WM_ERROR_STORE_OUT_OF_RANGE,
    WM_ERROR_STORE_ON_DEVICE,
    WM_ERROR_STORE_DEVICE_HIDDEN,
    WM_ERROR_STORE_INDEX,
    WM_ERROR_STORE_LAUNCH,
    WM_ERROR_STORE_NEVER_SERVED,
    WM_ERROR_STORE_INCOMPLETE,
    WM_ERROR_STORE_NO_SUCH_OBJECT,
    WM_ERROR_STORE_NO_SUCH_NAME,
    WM_ERROR_STORE_NOT_SEALED,
    WM_ERROR_STORE_NOT_YOURS,
    WM_ERROR_STORE_NOTHING_TO_SEAL,
    WM_ERROR_STORE_STILL_MAPPED,
    WM_ERROR_STORE_NAME_TOO_LONG,
    WM_ERROR_STORE_META_TOO_LONG,
    WM_ERROR_STORE_TOO_MANY_MEMBERS,
    WM_ERROR_STORE_OVER_QUOTA,
    WM_ERROR_STORE_INDEX_FULL,
    WM_ERROR_STORE_NO_SUCH_DEVICE,
    WM_ERROR_STORE_NO_MEMORY,
    WM_ERROR_STORE_CANNOT_ADOPT,
    WM_ERROR_STORE_NOT_TRUSTED,
    WM_ERROR_STORE_OUTSIDE_MEMORY,
    WM_ERROR_STORE_TOO_MANY_WAITING,
    WM_ERROR_STORE_OTHER_PROTOCOL,
    WM_ERROR_STORE_NO_DESCRIPTORS,
    WM_ERROR_STORE_NAME_TAKEN,
    WM_ERROR_STORE_MALFORMED,
    WM_ERROR_STORE_CLIENT_LIMIT,
    WM_ERROR_STORE_SERVERS_DIED,
    WM_ERROR_INVALID_HANDLE,
    WM_ERROR_NULL_POINTER,
    WM_ERROR_INVALID_ARGUMENT,
    WM_ERROR_PANIC,
    WM_ERROR_VERSION_MISMATCH,
    WM_ERROR_TOO_MANY_HANDLES,
];

/// Returns the name of a status, such as `WM_ERROR_TIMEOUT`, or `WM_ERROR_UNKNOWN` for a number that this library does not have.
///
/// The text is valid as long as the library is loaded. The call does not change the last error. Thread-safe.
#[unsafe(no_mangle)]
pub extern "C" fn wm_status_name(status: wm_status_t) -> *const c_char {
    let found = NAMES.binary_search_by_key(&status, |(number, _)| *number);
    found.map_or(c"WM_ERROR_UNKNOWN", |index| NAMES[index].1).as_ptr()
}
