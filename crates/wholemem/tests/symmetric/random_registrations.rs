//! Random sequences of registrations and calls, compared with a plain model: sums are right, whichever memory is registered, and
//! exactly the calls are staged whose memory is not.

use wholemem::{CallFaults, Dtype, Rank, ReduceOp, SymmetricMemory, Window};
use wholemem_hal::{Backend, BackendKind, Span, Stream};
use wholemem_os::Deadline;
use wholemem_testkit::{cuda, exhaustive, seed};

use super::harness::{on_ranks_with_spec, spec, spec_with_faults};
use super::random_elements::TestRandom;
use super::registered::MemoryKind;

/// The number of elements of a tensor.
const COUNT: usize = 3000;

/// A tensor of a rank, at an offset of its block that differs between the ranks, and the model of all ranks' elements.
struct Tensor {
    memory: Span,
    elements: Vec<Vec<u32>>,
    /// The registered ranges of elements, oldest first.
    windows: Vec<(usize, usize, Window)>,
}

impl Tensor {
    fn create(symmetric: &SymmetricMemory, stream: &Stream, random: &mut TestRandom) -> Self {
        let kinds: Vec<_> = MemoryKind::of(symmetric.group().device().backend()).collect();
        let own = symmetric.group().rank().index();
        // Each rank draws the same numbers, but uses another kind of memory and another offset.
        let (kind, skip) = (kinds[(random.below(8) + own) % kinds.len()], 64 * (random.below(16) + own));
        let block = kind.create(symmetric, skip + COUNT * 4);
        let first = random.next() as u32;
        let content =
            |rank: u32| (0..COUNT as u32).map(|at| first.wrapping_mul(rank + 1).wrapping_add(at)).collect();
        let elements: Vec<Vec<u32>> = (0..symmetric.group().size()).map(content).collect();
        let tensor = Self { memory: block.part(skip, COUNT * 4).unwrap(), elements, windows: Vec::new() };
        let bytes: Vec<u8> = tensor.elements[own].iter().flat_map(|element| element.to_ne_bytes()).collect();
        stream.write(&tensor.memory, &bytes).unwrap();
        tensor
    }

    fn part(&self, at: usize, count: usize) -> Span {
        self.memory.part(at * 4, count * 4).unwrap()
    }

    fn is_registered(&self, at: usize, count: usize) -> bool {
        self.windows.iter().any(|(start, len, _)| *start <= at && at + count <= start + len)
    }
}

/// Makes random calls. All ranks draw the same numbers.
fn check_sequence(symmetric: &SymmetricMemory, seed: u64, steps: usize) {
    let (group, random) = (symmetric.group(), &mut TestRandom(seed));
    let stream = group.device().stream().unwrap();
    let (own, ranks) = (group.rank().index(), group.size() as usize);
    let mut tensors: Vec<_> = (0..3).map(|_| Tensor::create(symmetric, &stream, random)).collect();
    let is_host = group.device().backend().kind() == BackendKind::Host;
    let (mut staged, mut kept) = (0, Vec::new());
    for step in 0..steps {
        let context = || format!("seed {seed}, step {step}, rank {own}");
        let tensor = random.below(tensors.len());
        let (at, count) = (random.below(COUNT), 1 + random.below(COUNT));
        let count = count.min(COUNT - at);
        match random.below(8) {
            0 | 1 => {
                let window = symmetric.window_register_span(&tensors[tensor].part(at, count)).unwrap();
                tensors[tensor].windows.push((at, count, window));
            }
            2 if !tensors[tensor].windows.is_empty() => {
                let window = random.below(tensors[tensor].windows.len());
                drop(tensors[tensor].windows.swap_remove(window));
            }
            3 => {
                // The memory is dropped while it is registered; the registration keeps it.
                let old = std::mem::replace(&mut tensors[tensor], Tensor::create(symmetric, &stream, random));
                if is_host {
                    drop(old.memory);
                } else {
                    // Freeing memory of `cudaMalloc` waits for the kernels of the process, which may wait for a call of this rank.
                    kept.push(old.memory);
                }
                if random.below(2) == 0 {
                    drop(symmetric.mem_alloc(1 + random.below(5000)).unwrap());
                }
                drop(old.windows);
            }
            _ => {
                let output = if random.below(2) == 0 { tensor } else { random.below(tensors.len()) };
                let to = if output == tensor { at } else { random.below(COUNT - count + 1) };
                let (from_span, to_span) = (tensors[tensor].part(at, count), tensors[output].part(to, count));
                // No rank may write elements that another rank has not written to its memory yet.
                stream.synchronize(Deadline::NEVER).unwrap();
                let recording = (random.below(4) == 0).then(|| symmetric.record_captures().unwrap());
                let call = |stream: &Stream| {
                    symmetric.all_reduce(stream, &from_span, &to_span, Dtype::U32, ReduceOp::Sum).unwrap();
                    Ok(())
                };
                let is_recorded = recording.is_some();
                match recording {
                    None => call(&stream).unwrap(),
                    Some(recording) => {
                        let graph = stream.capture(call).unwrap();
                        drop(recording.finish().unwrap());
                        graph.launch(&stream).unwrap();
                    }
                }
                let registered = is_recorded || tensors[tensor].is_registered(at, count);
                let in_place = output == tensor;
                let algorithm = symmetric.algorithm_of(count * 4, registered, in_place, true);
                let stages_output = algorithm == wholemem::Algorithm::TwoShot
                    && !(is_recorded || tensors[output].is_registered(to, count));
                staged += u64::from(!registered || stages_output);
                let sum = |at: usize| {
                    tensors[tensor]
                        .elements
                        .iter()
                        .fold(0_u32, |sum, elements| sum.wrapping_add(elements[at]))
                };
                let sums: Vec<_> = (at..at + count).map(sum).collect();
                for elements in &mut tensors[output].elements {
                    elements[to..to + count].copy_from_slice(&sums);
                }
                assert_eq!(symmetric.staged_calls(), staged, "{}", context());
            }
        }
        let checked = &tensors[random.below(tensors.len())];
        let mut seen = vec![0; COUNT * 4];
        stream.read(&checked.memory, &mut seen).unwrap();
        let seen: Vec<_> = seen.as_chunks().0.iter().map(|element| u32::from_ne_bytes(*element)).collect();
        let wrong = (0..COUNT).find(|at| seen[*at] != checked.elements[own][*at]);
        assert_eq!(wrong, None, "{}", context());
    }
    symmetric.check().unwrap();
    assert_eq!(ranks, tensors[0].elements.len());
    group.bootstrap().barrier().unwrap();
}

fn check_sequences(backend: &Backend, cases: u64) {
    let first = seed();
    let is_host = backend.kind() == BackendKind::Host;
    for case in 0..cases {
        let ranks = [2, 3, 5, 8][(case % if is_host { 4 } else { 2 }) as usize];
        let seed = first.wrapping_add(case);
        let algorithm = [None, Some(wholemem::Algorithm::OneShot), Some(wholemem::Algorithm::TwoShot)];
        let algorithm = algorithm[TestRandom(seed).below(3)];
        let spec = if is_host {
            spec(backend, ranks, algorithm)
        } else {
            spec_with_faults(backend, ranks, algorithm)
        };
        on_ranks_with_spec(backend, ranks, &spec, |symmetric| {
            let Rank(own) = symmetric.group().rank();
            let delays = CallFaults { seed: seed ^ u64::from(own), random: 100_000, ..CallFaults::default() };
            symmetric.inject_faults(&delays).unwrap();
            symmetric.group().bootstrap().barrier().unwrap();
            check_sequence(symmetric, seed, 30);
        });
    }
}

#[test]
fn random_sequences_of_registrations_and_calls_match_a_model() {
    check_sequences(&super::harness::host(), if exhaustive() { 10_000 } else { 40 });
}

#[test]
fn gpu_random_sequences_of_registrations_and_calls_match_a_model() {
    if let Some(backend) = cuda::backend() {
        check_sequences(&backend, 10);
    }
}
