//! Tests that host memory of GPU ranks is on the NUMA node of each rank's GPU.

use std::fs;

use wholemem::os::Memfd;
use wholemem::{
    Backend, Communicator, Kind, Location, MemorySpec, Rank, SymmetricMemory, SymmetricSpec, WholeMemory,
};
use wholemem_testkit::{FakeCuda, cuda};

/// Returns the NUMA policy of the memory file that is mapped at `address`, such as `bind:1`.
fn policy_of(address: u64) -> String {
    let maps = fs::read_to_string("/proc/self/numa_maps").unwrap();
    let policies = maps.lines().filter_map(|line| {
        let mut words = line.split(' ');
        Some((u64::from_str_radix(words.next()?, 16).ok()?, words.next()?))
    });
    let (_, policy) = policies.filter(|(start, _)| *start <= address).max().unwrap();
    policy.to_owned()
}

/// Returns the policy of memory for a GPU whose nearest node is `node`: unbound memory if the kernel refuses to bind memory to it.
fn policy_for(node: Option<u32>) -> String {
    let can_bind = |node: &u32| Memfd::create_near("probe", 4096, Some(*node)).is_ok();
    node.filter(can_bind).map_or_else(|| "default".to_owned(), |node| format!("bind:{node}"))
}

/// Creates a group with a rank for each of two GPUs; twice the same GPU if there is one.
fn groups(backend: &Backend) -> Vec<Communicator> {
    let last = backend.devices().len() - 1;
    let devices = [backend.device(0).unwrap(), backend.device(u32::try_from(last.min(1)).unwrap()).unwrap()];
    Communicator::local(&devices).unwrap()
}

/// Returns the policy of each rank's host memory.
fn expected(groups: &[Communicator]) -> Vec<String> {
    groups.iter().map(|group| policy_for(group.device().info().numa_node)).collect()
}

mod suite {
    use super::*;

    #[test]
    fn gpu_host_tables_are_on_the_node_of_the_gpu() {
        let Some(backend) = cuda::backend() else { return };
        let groups = groups(&backend);
        let expected = expected(&groups);
        for kind in [Kind::Continuous, Kind::Chunked] {
            let spec = MemorySpec { location: Location::Host, kind, ..MemorySpec::new(64, 4096) };
            let seen = Communicator::on_each(&groups, |group| {
                let memory = WholeMemory::create(group, &spec)?;
                Ok([0, 1].map(|rank| policy_of(memory.address_of(Rank(rank)).unwrap())))
            });
            assert_eq!(seen.unwrap(), [&expected[..]; 2], "{kind:?}");
        }
    }
}

/// This test is not part of the suite for the fake driver, which cannot create windows, because it does not run the kernels of
/// collective calls.
#[test]
fn gpu_host_windows_are_on_the_node_of_the_gpu() {
    let Some(backend) = cuda::backend() else { return };
    let groups = groups(&backend);
    let seen = Communicator::on_each(&groups, |group| {
        let symmetric = SymmetricMemory::create(group, &SymmetricSpec::default())?;
        let window = symmetric.mem_alloc_on_host(100_000)?;
        Ok([0, 1].map(|rank| policy_of(window.part_of(Rank(rank), 0, 1).unwrap().address())))
    });
    assert_eq!(seen.unwrap(), [&expected(&groups)[..]; 2]);
}

#[test]
fn the_suite_passes_on_the_fake_driver() {
    let Some(fake) = FakeCuda::install() else { return };
    // On a machine with one NUMA node, the second GPU has a node that does not exist, or none.
    for nodes in ["0,1", "0,-1"] {
        let passed = fake.rerun(&["numa::suite::"], &[("WHOLEMEM_FAKE_CUDA_NUMA_NODES", nodes)]);
        assert_eq!(passed, 1, "{nodes}");
    }
}
