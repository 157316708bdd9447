//! Words of shared memory that this process may only read.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

macro_rules! read_word {
    ($name:ident, $atomic:ident, $value:ident) => {
        /// A word that another process writes and this one may only read.
        ///
        /// It is not an atomic reference, because a store through one into a read-only map is a `SIGSEGV`, and
        /// because the language allows only relaxed loads there; an acquiring load is that and a fence.
        #[derive(Debug, Clone, Copy)]
        pub struct $name<'a>(&'a $atomic);

        impl<'a> $name<'a> {
            pub(super) fn new(word: &'a $atomic) -> Self {
                Self(word)
            }

            /// The value, with no promise about other bytes.
            #[must_use]
            pub fn load_relaxed(&self) -> $value {
                self.0.load(Ordering::Relaxed)
            }

            /// The value; what its writer stored before releasing it is visible afterwards.
            #[must_use]
            pub fn load_acquire(&self) -> $value {
                let value = self.0.load(Ordering::Relaxed);
                fence(Ordering::Acquire);
                value
            }
        }
    };
}

read_word!(ReadU32, AtomicU32, u32);
read_word!(ReadU64, AtomicU64, u64);
