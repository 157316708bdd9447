//! Starts a store server from the descriptors that the keeper process holds, either for a new store or after a server has died.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use wholemem_hal::Backend;
use wholemem_os::PacketSocket;
use wholemem_os::meminfo::MemoryProbe;
use wholemem_os::packet::PacketListener;

use super::accept::ClientAcceptor;
use super::admission::Admission;
use super::clients::{Clients, EndReason};
use super::event_loop::{Clock, EventLoop};
use super::executor::Executor;
use super::headroom::Headroom;
use super::index_memory::IndexMemory;
use super::keeper_link::KeeperLink;
use super::memory_table::MemoryTable;
use super::poller::{FixedSource, Interest};
use super::workers::Workers;
use crate::cells::MappedCells;
use crate::id::{AllocationId, ClientId};
use crate::index::{Geometry, ObjectIndex};
use crate::keeper::{DescriptorKey, DescriptorTable, Launch};
use crate::server::budget::{Budget, BudgetLimits};
use crate::server::machine::{HOST, InheritedState, Server, ServerSettings};
use crate::{Error, Result};

/// Builds the event loop of a server from the keeper's descriptors, and carries out the actions that the recovery of the store
/// needs.
pub(super) fn start<'a>(
    mut descriptors: DescriptorTable,
    socket: PacketSocket,
    mut settings: ServerSettings,
    geometry: Geometry,
    devices: Option<&Backend>,
    launch: &'a Launch<'a>,
) -> Result<EventLoop<'a>> {
    let listener = descriptors
        .take(DescriptorKey::Listener)
        .ok_or(Error::Incomplete { what: "the listening socket" })?;
    let acceptor = ClientAcceptor::new(
        PacketListener::adopt(listener, None)?,
        descriptors.take(DescriptorKey::SocketFile),
    );
    let (index_memory, index) = match descriptors.take(DescriptorKey::Index) {
        Some(fd) => IndexMemory::open(fd)?,
        None => IndexMemory::create(geometry, settings.host.quota, &socket)?,
    };
    // The quota is read from the index instead of being computed again: objects use memory, so less is available than for the
    // first server.
    settings.set_host_quota(index.quota());
    let limits = BudgetLimits::of_server(settings.host.quota, wholemem_os::descriptors::limit());
    let mut clients = Clients::new(settings.user, Budget::new(settings.user, limits))?;
    let mut memory = MemoryTable::default();
    let allocations = take_over_clients(descriptors, &mut clients, &mut memory);
    let inherited = InheritedState {
        allocations: allocations.keys().copied().collect(),
        clients: clients.iter().map(|(client, connection)| (client, connection.account.clone())).collect(),
    };
    take_over_memory(allocations, &index, &mut memory);
    let clock = Clock::start(Instant::now());
    let started = clock.now().unix;
    let (server, outputs) = Server::recover(index, &settings, &inherited, clock.now(), &mut memory);
    let epoch = server.index().epoch();
    clients.begin_ids(epoch << 32);
    let headroom = Arc::new(Headroom::new(MemoryProbe::open()?));
    let workers = Workers::start(devices, &headroom)?;
    let read = Interest { read: true, write: false };
    clients.poller().add_fixed(FixedSource::Workers, workers.wakeup(), read)?;
    acceptor.register(clients.poller())?;
    let admission = Admission::new(index_memory, settings.devices, headroom);
    let keeper = KeeperLink::new(socket, launch, clients.poller())?;
    let executor =
        Executor { memory, clients, keeper, workers, admission, retries: BTreeMap::new(), started };
    let mut event_loop = EventLoop::new(server, executor, acceptor, clock);
    event_loop.execute(outputs, None);
    let server = std::process::id();
    let (clients, objects) = (inherited.clients.len(), event_loop.status().objects);
    tracing::info!(epoch, server, clients, objects, "a server serves the store");
    Ok(event_loop)
}

/// Takes over the clients of the previous server. Returns the memory that the keeper process held for the store.
fn take_over_clients(
    descriptors: DescriptorTable,
    clients: &mut Clients,
    memory: &mut MemoryTable,
) -> BTreeMap<AllocationId, OwnedFd> {
    let (mut allocations, mut client_ids) = (BTreeMap::new(), BTreeSet::<ClientId>::new());
    let mut client_descriptors = DescriptorTable::default();
    for (key, fd) in descriptors.into_iter() {
        match key {
            DescriptorKey::Allocation(allocation) => drop(allocations.insert(allocation, fd)),
            DescriptorKey::Socket(client) | DescriptorKey::Pins(client) | DescriptorKey::Process(client) => {
                client_ids.insert(client);
                client_descriptors.insert(key, fd);
            }
            DescriptorKey::Index
            | DescriptorKey::Listener
            | DescriptorKey::SocketFile
            | DescriptorKey::Server => {}
        }
    }
    for client in client_ids {
        let outcome = clients.take_over(client, &mut client_descriptors).and_then(|connection| {
            let admitted = connection.and_then(|connection| connection.admitted.as_ref());
            admitted.map(|admitted| memory.add_pins(client, &admitted.pins)).transpose()
        });
        if let Err(error) = outcome {
            // The failure to take over a client concerns this client only; the others are served.
            tracing::error!(%client, %error, "cannot take over a client");
            clients.end(client, EndReason::Left, || false);
        }
    }
    allocations
}

/// Takes over the memory of the previous server. Arenas (memory that small objects share) are opened for reading, because they
/// may contain objects.
fn take_over_memory(
    allocations: BTreeMap<AllocationId, OwnedFd>,
    index: &ObjectIndex<MappedCells>,
    memory: &mut MemoryTable,
) {
    for (allocation, fd) in allocations {
        let record = index.allocation(allocation);
        let added = memory.add(allocation, fd, record.is_none_or(|record| record.place == HOST));
        let is_arena = record.is_some_and(|record| record.is_arena);
        let mut opened = || if is_arena { memory.open_for_reading(allocation) } else { Ok(()) };
        if let Err(error) = added.and_then(|()| opened()) {
            tracing::error!(%allocation, %error, "cannot open memory for reading");
        }
    }
}
