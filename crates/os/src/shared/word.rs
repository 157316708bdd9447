//! Read-only words of shared memory that other processes write.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

macro_rules! read_word {
    ($name:ident, $atomic:ident, $value:ident) => {
        /// A word of shared memory that another process writes and this process only reads.
        ///
        /// It is not a reference to an atomic: a store through one into a read-only mapping would raise `SIGSEGV`,
        /// and on read-only memory the language allows only relaxed loads. An acquire load is a relaxed load and a
        /// fence.
        #[derive(Debug, Clone, Copy)]
        pub struct $name<'a>(&'a $atomic);

        impl<'a> $name<'a> {
            pub(super) fn new(word: &'a $atomic) -> Self {
                Self(word)
            }

            /// Loads the value of the word, without ordering other accesses.
            #[must_use]
            pub fn load_relaxed(&self) -> $value {
                self.0.load(Ordering::Relaxed)
            }

            /// Loads the value of the word. Stores that the writing process made before its release store of the
            /// value are visible afterwards.
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
