//! Handles: 64-bit numbers by which C refers to objects of this library.
//!
//! A handle is a structure with one number in C, one structure type for each kind of object, so that the compiler of the caller rejects
//! a handle of another kind. The library checks kind, slot and generation in every call, because callers in other languages, casts and
//! freed handles get past the compiler.

mod free_list;
mod state;
mod table;

use std::fmt;

use table::HandleTable;
pub(crate) use table::Used;

/// All objects of this process.
static TABLE: HandleTable = HandleTable::new();

/// The kind of an object. The numbers are part of the handles and only have to differ.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum Kind {
    Device = 1,
    Communicator,
    Stream,
    Memory,
    Tensor,
    SymmetricMemory,
    Window,
    Graph,
    CaptureRecording,
    Backend,
    StoreClient = 32,
    StoreDraft,
    StoreObject,
    StorePack,
    StoreWatch,
    StoreList,
    LogSubscription = 48,
    Text,
}

impl Kind {
    const ALL: [Self; 18] = [
        Self::Device,
        Self::Communicator,
        Self::Stream,
        Self::Memory,
        Self::Tensor,
        Self::SymmetricMemory,
        Self::Window,
        Self::Graph,
        Self::CaptureRecording,
        Self::Backend,
        Self::StoreClient,
        Self::StoreDraft,
        Self::StoreObject,
        Self::StorePack,
        Self::StoreWatch,
        Self::StoreList,
        Self::LogSubscription,
        Self::Text,
    ];

    /// Returns the kind with a number of a handle.
    fn of(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u8 == number)
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Device => "device",
            Self::Communicator => "communicator",
            Self::Stream => "stream",
            Self::Memory => "whole memory",
            Self::Tensor => "tensor",
            Self::SymmetricMemory => "symmetric memory",
            Self::Window => "window",
            Self::Graph => "graph",
            Self::CaptureRecording => "capture recording",
            Self::Backend => "backend",
            Self::StoreClient => "store client",
            Self::StoreDraft => "store draft",
            Self::StoreObject => "store object",
            Self::StorePack => "store pack",
            Self::StoreWatch => "store watch",
            Self::StoreList => "store list",
            Self::LogSubscription => "log subscription",
            Self::Text => "text",
        })
    }
}

/// A type whose values handles refer to. Each kind is that of one type.
pub(crate) trait Object: Send + Sync + 'static {
    /// The kind of the handles of this type.
    const KIND: Kind;
}

/// Why a handle is invalid.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum HandleError {
    /// The handle is zero.
    #[error("the handle of a {expected} is zero")]
    Zero {
        /// The kind of handle that the call needs.
        expected: Kind,
    },

    /// The number has no kind of this library.
    #[error("{handle:#x} is not a handle of a {expected}")]
    NotAHandle {
        /// The number that was passed.
        handle: u64,
        /// The kind of handle that the call needs.
        expected: Kind,
    },

    /// The handle is of another kind.
    #[error("the handle {handle:#x} is of a {found}, not of a {expected}")]
    OtherKind {
        /// The handle that was passed.
        handle: u64,
        /// The kind of the handle.
        found: Kind,
        /// The kind of handle that the call needs.
        expected: Kind,
    },

    /// The handle was freed, or was not created in this process.
    #[error("the handle {handle:#x} was freed, or is of another process")]
    Unknown {
        /// The handle that was passed.
        handle: u64,
    },

    /// As many calls as a slot can count use the object.
    #[error("too many calls use the handle {handle:#x} at the same time")]
    TooManyCalls {
        /// The handle that was passed.
        handle: u64,
    },

    /// All slots have objects.
    #[error("a process can have at most {limit} handles")]
    Full {
        /// The maximum number of handles.
        limit: u32,
    },
}

impl HandleError {
    #[cold]
    fn of_other_kind(handle: u64, kind: u8, expected: Kind) -> Self {
        match Kind::of(kind) {
            _ if handle == 0 => Self::Zero { expected },
            Some(found) => Self::OtherKind { handle, found, expected },
            None => Self::NotAHandle { handle, expected },
        }
    }
}

/// Adds an object to the table, and returns its handle.
pub(crate) fn add<T: Object>(object: T) -> Result<u64, HandleError> {
    TABLE.add(object)
}

/// Returns the object of a handle. It is kept alive until the result is dropped.
#[inline]
pub(crate) fn get<T: Object>(handle: u64) -> Result<Used<'static, T>, HandleError> {
    TABLE.get(handle)
}

/// Frees a handle. The object is dropped at once, or at the end of the last call that uses it.
pub(crate) fn free<T: Object>(handle: u64) -> Result<(), HandleError> {
    TABLE.free(handle, T::KIND)
}

/// Connects a handle type of the header with the type of its objects.
macro_rules! handle_type {
    ($handle:ident, $object:ty, $kind:ident) => {
        impl crate::handle::Object for $object {
            const KIND: crate::handle::Kind = crate::handle::Kind::$kind;
        }

        #[allow(dead_code, reason = "not every kind of handle is used in every way")]
        impl $handle {
            /// Adds an object, and returns its handle.
            pub(crate) fn create(object: $object) -> Result<Self, crate::handle::HandleError> {
                Ok(Self { value: crate::handle::add(object)? })
            }

            /// Returns the object of this handle, and keeps it alive until the result is dropped.
            #[inline]
            pub(crate) fn get(
                self,
            ) -> Result<crate::handle::Used<'static, $object>, crate::handle::HandleError> {
                crate::handle::get(self.value)
            }

            /// Frees this handle.
            pub(crate) fn free(self) -> Result<(), crate::handle::HandleError> {
                crate::handle::free::<$object>(self.value)
            }
        }
    };
}

pub(crate) use handle_type;
