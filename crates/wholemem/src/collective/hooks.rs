//! Test hooks of collective calls, which inject delays, call counters close to overflow, broken synchronization rules and other
//! kernels.
//!
//! They exist only with the feature `test-hooks`. Without it a lane has no debug words (their address is zero), and the kernels
//! are always those of this crate. Every synchronization rule has a bit that makes kernels break it, and
//! a test that then fails.

#[cfg(not(feature = "test-hooks"))]
pub(super) use disabled::*;
#[cfg(feature = "test-hooks")]
pub use enabled::CallFaults;
#[cfg(feature = "test-hooks")]
pub(super) use enabled::{DEBUG_LEN, LaneHooks, image};

/// The implementation of the hooks of collective calls without the feature `test-hooks`.
#[cfg(not(feature = "test-hooks"))]
mod disabled {
    use wholemem_hal::KernelImage;

    use super::super::{Lane, SymmetricSpec};
    use crate::LaneRef;

    /// The length of the words through which tests inject faults into a lane: zero without the feature `test-hooks`.
    pub(in super::super) const DEBUG_LEN: usize = 0;

    impl Lane {
        /// Returns the description of this lane that is passed to kernels.
        pub(in super::super) fn current(&self) -> LaneRef {
            self.reference
        }
    }

    /// Returns the image of the collective kernels to load.
    pub(in super::super) fn image(_: &SymmetricSpec, default_image: KernelImage) -> KernelImage {
        default_image
    }
}

/// The implementation of the hooks of collective calls with the feature `test-hooks`.
#[cfg(feature = "test-hooks")]
mod enabled {
    use std::sync::atomic::{AtomicU64, Ordering};

    use wholemem_hal::{KernelImage, Mapping, Span, Stream};
    use wholemem_os::width::to_usize;
    use zerocopy::IntoBytes;

    use super::super::lane::CONTROL_LEN;
    use super::super::{Lane, SymmetricSpec};
    use crate::abi::{
        ControlWord, DEBUG_POINTS, DIGEST_BITS, DebugWord, LaneRef, MAX_BLOCKS, Mutant, PHASE_BITS,
        SIGNAL_STRIDE, slot_at,
    };
    use crate::{Error, Result};

    /// The length of a lane's debug words, through which tests inject faults. They follow the lane's control words.
    pub(in super::super) const DEBUG_LEN: usize = 12 << 10;

    const _: () = assert!(8 * (DebugWord::Delays as u32 + DEBUG_POINTS * MAX_BLOCKS) as usize <= DEBUG_LEN);

    /// Faults that a test injects into the collective calls of this rank.
    #[derive(Debug, Clone, PartialEq, Eq, Default)]
    pub struct CallFaults {
        /// The synchronization rule that the kernels of this rank break.
        pub mutant: Option<Mutant>,
        /// The seed of the random delays in collective calls.
        pub seed: u64,
        /// The maximum random delay in a collective call in nanoseconds; zero for no random delays.
        pub random: u64,
        /// Fixed delays in collective calls. Each has the number of a point of the call, the number of a block, and nanoseconds.
        pub delays: Vec<(usize, u32, u64)>,
        /// The sequence number of the next collective call, to test overflow of the counter. It must be equal on all ranks.
        pub counter: Option<u64>,
    }

    impl CallFaults {
        /// Encodes these faults as the debug words that kernels read.
        fn words(&self) -> Vec<u64> {
            let delay_at = |point: usize, block: u32| {
                DebugWord::Delays as usize + point * MAX_BLOCKS as usize + block as usize
            };
            let mut words = vec![0_u64; delay_at(DEBUG_POINTS as usize, 0)];
            words[DebugWord::Mutant as usize] = self.mutant.map_or(0, |mutant| u64::from(mutant as u32));
            words[DebugWord::Seed as usize] = self.seed;
            words[DebugWord::MaxDelay as usize] = self.random;
            for (point, block, delay) in &self.delays {
                if let Some(word) = words.get_mut(delay_at(*point, *block)) {
                    *word = *delay;
                }
            }
            words
        }

        /// Returns true if kernels must read the debug words to inject these faults.
        fn needs_debug_words(&self) -> bool {
            let Self { mutant, random, delays, .. } = self;
            mutant.is_some() || *random != 0 || !delays.is_empty()
        }
    }

    /// The memory of a lane through which tests inject faults into collective calls.
    #[derive(Debug)]
    pub(in super::super) struct LaneHooks {
        /// The address of the lane's debug words, or zero if kernels do not read them.
        debug: AtomicU64,
        /// The control words and debug words of the lane.
        private: Span,
        /// Every rank's memory of all lanes, with the offset of this lane in that memory.
        memory: Vec<(Span, usize)>,
    }

    impl LaneHooks {
        /// Zeroes the debug words of a new lane.
        pub(in super::super) fn create(
            stream: &Stream,
            private: Span,
            maps: &[Mapping],
            offset: usize,
        ) -> Result<Self> {
            stream.write(&private.part(CONTROL_LEN, DEBUG_LEN)?, &[0; DEBUG_LEN])?;
            let memory = maps.iter().map(|map| (map.all(), offset)).collect();
            Ok(Self { debug: AtomicU64::new(0), private, memory })
        }

        /// Overwrites the call counters of a lane. No call of the lane may be in flight.
        fn set_counters(&self, stream: &Stream, lane: &LaneRef, counter: u64) -> Result<()> {
            let counters = counter.to_ne_bytes().repeat(MAX_BLOCKS as usize);
            let words = self.private.part(ControlWord::Sequence as usize * 8, counters.len())?;
            stream.write(&words, &counters)?;
            self.set_progress(stream, lane, counter.wrapping_sub(1))
        }

        /// Sets the progress and the mark of this rank, which the other ranks read, to those of the call with the given number. CPU
        /// ranks use only the signals of the first block, and the signals in front of their own packets.
        fn set_progress(&self, stream: &Stream, lane: &LaneRef, number: u64) -> Result<()> {
            let LaneRef { rank, ranks, .. } = *lane;
            let on_host = stream.runs_inline();
            let blocks = if on_host { 1 } else { u64::from(MAX_BLOCKS) };
            let set = |(memory, offset): &(Span, usize), at: u64| {
                let at = offset + to_usize(at);
                let words = [number << PHASE_BITS, number << DIGEST_BITS];
                Ok::<_, Error>(stream.write(&memory.part(at, 16)?, words.as_bytes())?)
            };
            for memory in &self.memory {
                for block in 0..blocks {
                    set(memory, (block * u64::from(ranks) + u64::from(rank)) * SIGNAL_STRIDE)?;
                }
            }
            if on_host {
                for parity in 0..2 {
                    set(&self.memory[rank as usize], slot_at(lane, rank, parity))?;
                }
            }
            Ok(())
        }
    }

    impl Lane {
        /// Returns the description of this lane that is passed to kernels, with the address of its debug words.
        pub(in super::super) fn current(&self) -> LaneRef {
            LaneRef { debug: self.hooks.debug.load(Ordering::Acquire), ..self.reference }
        }

        /// Injects faults into later collective calls of this rank. No collective call may be in flight on any rank.
        ///
        /// # Errors
        /// [`Error::Hal`].
        #[doc(hidden)]
        pub fn inject_faults(&self, faults: &CallFaults) -> Result<()> {
            let LaneHooks { debug, private, .. } = &self.hooks;
            let stream = self.group.device().stream()?;
            if let Some(counter) = faults.counter {
                self.hooks.set_counters(&stream, &self.reference, counter)?;
            }
            let words = faults.words();
            stream.write(&private.part(CONTROL_LEN, size_of_val(&words[..]))?, words.as_bytes())?;
            let address = if faults.needs_debug_words() { private.address() + CONTROL_LEN as u64 } else { 0 };
            debug.store(address, Ordering::Release);
            Ok(())
        }
    }

    /// Returns the image of the collective kernels to load: the PTX of a test, if the test provides one.
    pub(in super::super) fn image(spec: &SymmetricSpec, default_image: KernelImage) -> KernelImage {
        KernelImage { ptx: spec.kernels.or(default_image.ptx), ..default_image }
    }
}
