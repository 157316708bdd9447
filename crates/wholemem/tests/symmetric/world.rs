//! Ranks of one process, and how the tests run something on all of them.

use std::time::Duration;

use wholemem::{Algorithm, Communicator, SymmetricMemory, SymmetricSpec, Tuning};
use wholemem_hal::{Backend, BackendKind, HostConfig, Rights, Span, Stream};
use wholemem_testkit::cuda;

/// Short, so that few elements take several pieces.
pub(crate) const STAGING: usize = 4096;

pub(crate) fn host() -> Backend {
    Backend::host(HostConfig::default()).unwrap()
}

/// So many ranks on the first device of a backend.
pub(crate) fn groups(backend: &Backend, ranks: u32) -> Vec<Communicator> {
    let device = backend.device(0).unwrap();
    Communicator::local(&vec![device; ranks as usize]).unwrap()
}

/// What the tests ask for: little staging, and an algorithm.
pub(crate) fn spec(backend: &Backend, ranks: u32, always: Option<Algorithm>) -> SymmetricSpec {
    // Windows are read where they are, however short.
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

/// The same, whose kernels heed what is to go wrong.
pub(crate) fn fragile(backend: &Backend, ranks: u32, always: Option<Algorithm>) -> SymmetricSpec {
    SymmetricSpec { kernels: Some(cuda::COLLECTIVE_PTX), ..spec(backend, ranks, always) }
}

/// Ranks with symmetric memory, each a thread that does `work`.
pub(crate) fn on_ranks<T: Send>(
    backend: &Backend,
    ranks: u32,
    always: Option<Algorithm>,
    work: impl Fn(&SymmetricMemory) -> T + Sync,
) -> Vec<T> {
    on_ranks_like(backend, ranks, &spec(backend, ranks, always), work)
}

/// The same, like this.
pub(crate) fn on_ranks_like<T: Send>(
    backend: &Backend,
    ranks: u32,
    spec: &SymmetricSpec,
    work: impl Fn(&SymmetricMemory) -> T + Sync,
) -> Vec<T> {
    Communicator::on_each(&groups(backend, ranks), |group| Ok(work(&SymmetricMemory::create(group, spec)?)))
        .unwrap()
}

/// Memory of one rank with guards around every use of it.
pub(crate) struct Guarded {
    memory: Span,
    stream: Stream,
    at: usize,
    len: usize,
}

const GUARD: u8 = 0xA5;

impl Guarded {
    /// `len` bytes, `at` bytes into some memory, which are something else than what is expected there.
    pub(crate) fn new(stream: &Stream, memory: Span, at: usize, len: usize) -> Self {
        Self { memory, stream: stream.clone(), at, len }
    }

    pub(crate) fn buffer(symmetric: &SymmetricMemory, len: usize) -> Span {
        let device = symmetric.group().device();
        let room = device.granularity().unwrap().minimum.round_up(len).unwrap();
        device.allocate(room).unwrap().map(Rights::ReadWrite).unwrap().span(0, len).unwrap()
    }

    /// Fills the whole memory with guards, and puts `content` in its place.
    pub(crate) fn put(&self, content: &[u8]) {
        let mut bytes = vec![GUARD; self.memory.len()];
        bytes[self.at..self.at + content.len()].copy_from_slice(content);
        self.stream.write(&self.memory, &bytes).unwrap();
    }

    /// What is in place now. Whatever is around it is untouched.
    pub(crate) fn take(&self, what: impl FnOnce() -> String) -> Vec<u8> {
        let mut bytes = vec![0; self.memory.len()];
        self.stream.read(&self.memory, &mut bytes).unwrap();
        let (before, rest) = bytes.split_at(self.at);
        let (inside, behind) = rest.split_at(self.len);
        // Slices are compared at once, also where nothing is optimized.
        let guards = vec![GUARD; before.len().max(behind.len())];
        let untouched = before == &guards[..before.len()] && behind == &guards[..behind.len()];
        assert!(untouched, "{}: a byte outside was written", what());
        inside.to_vec()
    }

    pub(crate) fn span(&self) -> Span {
        self.memory.part(self.at, self.len).unwrap()
    }
}
