//! Tests of how a rank process chooses its device by the environment variables of its launcher.

#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use wholemem::{Bootstrap, Communicator};
use wholemem_hal::{Backend, HostConfig};
use wholemem_testkit::{Ranks, test_name};

/// Chooses a device for a single rank with four visible devices. The parameter of the test is the number of the expected
/// device.
fn body(rank: &wholemem_testkit::Rank) {
    let comm = Bootstrap::from_env().unwrap();
    let backend = Backend::host(HostConfig::virtual_devices(4)).unwrap();
    let device = Communicator::choose_device(&backend, &comm).unwrap();
    assert_eq!(device.id().0.to_string(), rank.parameter());
}

#[test]
fn the_launchers_local_rank_chooses_among_the_visible_devices() {
    if Ranks::is_rank() {
        return Ranks::of(1).run(test_name!(), body);
    }
    let torchrun = [("RANK", "0"), ("WORLD_SIZE", "1")];
    let slurm = [("SLURM_PROCID", "0"), ("SLURM_NTASKS", "1")];
    let open_mpi = [("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "1")];
    for (launcher, local_rank, device) in [
        (torchrun, ("LOCAL_RANK", "2"), "2"),
        (torchrun, ("LOCAL_RANK", "7"), "3"),
        (slurm, ("SLURM_LOCALID", "5"), "1"),
        (open_mpi, ("OMPI_COMM_WORLD_LOCAL_RANK", "6"), "2"),
        // The local rank from another launcher is ignored, so the rank in the group is used instead.
        (torchrun, ("SLURM_LOCALID", "2"), "0"),
    ] {
        let run = format!("devices-{}-{device}", std::process::id());
        let variables = launcher.into_iter().chain([local_rank, ("WHOLEMEM_RENDEZVOUS", &*run)]);
        let ranks = variables.fold(Ranks::of(1), |ranks, (name, value)| ranks.env(name, value));
        ranks.parameter(device).run(test_name!(), body);
    }
}
