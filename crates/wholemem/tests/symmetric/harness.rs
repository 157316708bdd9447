//! The harness for tests of symmetric memory: ranks in one process, and buffers with guard bytes.

use std::time::Duration;

use wholemem::{Algorithm, Communicator, SymmetricMemory, SymmetricSpec, Tuning};
use wholemem_hal::{Backend, BackendKind, HostConfig, Rights, Span, Stream};
use wholemem_testkit::cuda;

/// The length of a staging buffer in bytes. It is so short that few elements need several pieces.
pub(crate) const STAGING: usize = 4096;

pub(crate) fn host() -> Backend {
    Backend::host(HostConfig::default()).unwrap()
}

/// Creates `ranks` ranks on the first device of a backend.
pub(crate) fn groups(backend: &Backend, ranks: u32) -> Vec<Communicator> {
    let device = backend.device(0).unwrap();
    Communicator::local(&vec![device; ranks as usize]).unwrap()
}

/// Returns the options for the symmetric memory of tests: short staging buffers, and a fixed algorithm if `always` is set.
pub(crate) fn spec(backend: &Backend, ranks: u32, always: Option<Algorithm>) -> SymmetricSpec {
    // With this tuning, inputs in windows are never copied to staging buffers.
    let tuning = Tuning { always, stage_window: 0, ..Tuning::measured(backend.kind(), ranks) };
    let timeout = Duration::from_secs(if backend.kind() == BackendKind::Host { 120 } else { 20 });
    let packets_len = 8 << 10;
    SymmetricSpec {
        staging_len: STAGING,
        packets_len,
        timeout,
        tuning: Some(tuning),
        ..SymmetricSpec::default()
    }
}

/// Returns the options of [`spec`], with GPU kernels that support fault injection.
pub(crate) fn spec_with_faults(backend: &Backend, ranks: u32, always: Option<Algorithm>) -> SymmetricSpec {
    SymmetricSpec { kernels: Some(cuda::COLLECTIVE_PTX), ..spec(backend, ranks, always) }
}

/// Calls `work` on ranks with symmetric memory, each rank in a thread of its own.
pub(crate) fn on_ranks<T: Send>(
    backend: &Backend,
    ranks: u32,
    always: Option<Algorithm>,
    work: impl Fn(&SymmetricMemory) -> T + Sync,
) -> Vec<T> {
    on_ranks_with_spec(backend, ranks, &spec(backend, ranks, always), work)
}

/// Calls `work` on ranks like [`on_ranks`], with the given options for symmetric memory.
pub(crate) fn on_ranks_with_spec<T: Send>(
    backend: &Backend,
    ranks: u32,
    spec: &SymmetricSpec,
    work: impl Fn(&SymmetricMemory) -> T + Sync,
) -> Vec<T> {
    Communicator::on_each(&groups(backend, ranks), |group| Ok(work(&SymmetricMemory::create(group, spec)?)))
        .unwrap()
}

/// A range of one rank's memory that is surrounded by guard bytes.
pub(crate) struct Guarded {
    memory: Span,
    stream: Stream,
    at: usize,
    len: usize,
}

const GUARD: u8 = 0xA5;

impl Guarded {
    /// Selects the `len` bytes at offset `at` of `memory`.
    pub(crate) fn new(stream: &Stream, memory: Span, at: usize, len: usize) -> Self {
        Self { memory, stream: stream.clone(), at, len }
    }

    pub(crate) fn buffer(symmetric: &SymmetricMemory, len: usize) -> Span {
        let device = symmetric.group().device();
        let room = device.granularity().unwrap().minimum.round_up(len).unwrap();
        device.allocate(room).unwrap().map(Rights::ReadWrite).unwrap().span(0, len).unwrap()
    }

    /// Fills the whole memory with guard bytes, and writes `content` to the selected range.
    pub(crate) fn write(&self, content: &[u8]) {
        let mut bytes = vec![GUARD; self.memory.len()];
        bytes[self.at..self.at + content.len()].copy_from_slice(content);
        self.stream.write(&self.memory, &bytes).unwrap();
    }

    /// Reads the selected range, and checks that the guard bytes around it are unchanged.
    pub(crate) fn read(&self, context: impl FnOnce() -> String) -> Vec<u8> {
        let mut bytes = vec![0; self.memory.len()];
        self.stream.read(&self.memory, &mut bytes).unwrap();
        let (before, rest) = bytes.split_at(self.at);
        let (inside, after) = rest.split_at(self.len);
        // Guard bytes are compared as whole slices, which is fast even without optimization.
        let guards = vec![GUARD; before.len().max(after.len())];
        let untouched = before == &guards[..before.len()] && after == &guards[..after.len()];
        assert!(untouched, "{}: a byte outside the range was written", context());
        inside.to_vec()
    }

    pub(crate) fn span(&self) -> Span {
        self.memory.part(self.at, self.len).unwrap()
    }
}
