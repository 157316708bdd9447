//! Tests that operations which share memory are refused for ranks on several nodes, at once and on every rank.

use std::net::TcpListener;
use std::time::Duration;

use wholemem::prelude::*;
use wholemem::{Bootstrap, Error, HostConfig, Network, SymmetricSpec, UniqueId};
use wholemem_comm::Error as CommError;
use wholemem_os::Deadline;

#[test]
fn tables_and_symmetric_memory_over_several_nodes_are_refused() {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    let network = Network::new(listener.local_addr().expect("an address")).with_listener(listener);
    let folder = tempfile::tempdir().expect("a directory");
    let id = UniqueId::create().expect("an id");
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let network = network.clone().with_socket_dir(&folder.path().join(rank.to_string()));
            let id = &id;
            scope.spawn(move || {
                let deadline = Deadline::after(Duration::from_secs(60));
                let group = Bootstrap::create_over(&network, id, Rank(rank), 2, deadline).expect("a group");
                let device =
                    Backend::host(HostConfig::default()).expect("the host").device(0).expect("a device");
                let comm = Communicator::create(group, &device).expect("a communicator");
                let refused = |what| Some(Error::Comm(CommError::AcrossNodes { what, nodes: 2 }));
                let table = WholeTensor::create(&comm, &TensorSpec::of::<f32>(&[8, 4]));
                assert_eq!(table.err(), refused("create a table"));
                let symmetric = SymmetricMemory::create(&comm, &SymmetricSpec::default());
                assert_eq!(symmetric.err(), refused("create symmetric memory"));
                comm.barrier().expect("the group is usable");
            });
        }
    });
}
