//! The pins (marks that an object of the store is in use) of forked children: a child holds the objects of its parent
//! from the moment at which `fork` returns in the child.
//!
//! ```text
//!   parent, before the fork     opens another connection, sends `await child`: its pin page is valid while this connection is
//!                               open; blocks new pins; copies all its pins to that page
//!   parent, after the fork      closes its end of the connection
//!   child, before `fork`        connects, sends `claim`: from the answer on the page is valid while the child's process lives;
//!   returns to it               closes both connections
//! ```
//!
//! So an object that the child can read is pinned at every moment: first by the parent, then by the connection that parent and
//! child share, then by the child. A child that forks does the same with the page that it has claimed.
//!
//! If a child cannot get its pins, because the server refuses or does not answer in time, it cannot read small objects: their
//! memory is made inaccessible in the child, and reading it raises `SIGSEGV`. Large objects stay readable, because their memory
//! is never reused. The child allocates no memory here before `fork` returns. If nothing is pinned, a fork costs two lock
//! operations.
//!
//! Not covered: children that are created without the C library's `fork`, or by a thread that is exiting. Pins of a child are not
//! released before it exits; if it executes another program, they are held until that exits.

use std::cell::RefCell;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use wholemem_hal::Mapping;
use wholemem_os::fork::{self, ForkHooks};
use wholemem_os::packet::{Address, EncodedAddress};
use wholemem_os::vm::Protection;
use wholemem_os::{Deadline, Memfd, PacketSocket, PrivateMap, SharedMap};

use super::ClientCore;
use crate::cells::MappedCells;
use crate::pin::{self, PINS_LEN};
use crate::protocol::{Answer, Request, RequestKind, Response, frame};
use crate::{Error, Refusal, Result};

/// The time that a fork waits for the server: in the parent before the fork, and in the child after it.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The delay between two attempts to connect to the server of a store.
const RETRY: Duration = Duration::from_millis(1);

/// The id of the claim, the only request on the connection of a forked child.
const CLAIM_ID: u64 = 1;

/// The maximum number of rounds in which a fork prepares clients that take their first pin during the preparation.
const MAX_ROUNDS: usize = 4;

static HOOKS: ForkHooks = ForkHooks { before, in_parent, in_child };

static REGISTRY: Mutex<Registry> =
    Mutex::new(Registry { cores: Vec::new(), private: Vec::new(), inherited: Vec::new() });

thread_local! {
    /// The state of the fork that this thread is executing.
    static FORK: RefCell<Option<Fork>> = const { RefCell::new(None) };
}

/// The connections and maps of this process that forked children inherit. The fork hooks hold the lock of the registry during a
/// fork, so that no other thread holds it in the child.
#[derive(Debug)]
struct Registry {
    cores: Vec<Weak<ClientCore>>,
    /// The copy-on-write maps of small objects, with their connections.
    private: Vec<(Weak<ClientCore>, Weak<PrivateMap>)>,
    /// The pin pages (memory that marks the objects in use) that this process has inherited from its own parent.
    inherited: Vec<PinHolder>,
}

/// A connection that holds pins, and its pin page: opened by this process, or inherited from its parent and claimed.
#[derive(Debug, Clone)]
struct PinHolder {
    core: Arc<ClientCore>,
    page: MappedCells,
    /// The arenas (memory that small objects share) of the inherited objects. They are stored here because finding them takes a
    /// lock, which a thread that does not exist in the child may hold.
    arenas: Arc<[Arc<Mapping>]>,
}

impl PinHolder {
    /// Returns the arenas (memory that small objects share) that contain the pinned objects.
    fn arenas(&self) -> Arc<[Arc<Mapping>]> {
        let core = &self.core;
        if core.epoch.is_current() { core.maps.arenas(&core.index).into() } else { Arc::clone(&self.arenas) }
    }
}

/// The state of a fork in progress, from the hook `before` to the hook `in_parent` or `in_child`.
#[derive(Debug)]
struct Fork {
    registry: MutexGuard<'static, Registry>,
    accesses: Vec<ChildAccess>,
    /// The pin pages (memory that marks the objects in use) that the forked child inherits.
    inherited: Vec<PinHolder>,
    /// The connections on which new pins are blocked until the fork is complete.
    paused: Vec<Arc<ClientCore>>,
}

/// The access of a forked child to the pinned objects of one connection.
#[derive(Debug)]
struct ChildAccess {
    transfer: PinTransfer,
    /// The memory of small objects, which is made inaccessible in the child if the child does not get its pins.
    arenas: Arc<[Arc<Mapping>]>,
    private: Vec<Arc<PrivateMap>>,
}

/// The way in which pinned objects stay valid for a forked child.
#[derive(Debug)]
enum PinTransfer {
    /// The forked child claims a pin page: memory that marks the objects that the child uses, filled by its parent
    /// before the fork.
    Claim(PageClaim),
    /// No pins are needed, because the store has ended and its memory is never overwritten.
    NotNeeded,
    /// The parent could not get pins for the child, so the child must not read small objects.
    Failed,
}

/// The data that a forked child needs to claim its pin page (memory that marks the objects that the child uses), all
/// prepared before the fork.
#[derive(Debug)]
struct PageClaim {
    page: MappedCells,
    /// The connection that keeps the pin page valid until the child claims the page.
    connection: PacketSocket,
    address: EncodedAddress,
    request: Vec<u8>,
    granted: Vec<u8>,
}

fn registry() -> MutexGuard<'static, Registry> {
    REGISTRY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Registers a connection whose pins are passed on to forked children.
pub(super) fn add(core: &Arc<ClientCore>) -> Result<()> {
    fork::register(&HOOKS)?;
    let mut registry = registry();
    // Connections that this process inherited from its parent do not belong to this process.
    registry.cores.retain(|core| core.upgrade().is_some_and(|core| core.epoch.is_current()));
    registry.cores.push(Arc::downgrade(core));
    Ok(())
}

/// Registers a copy-on-write map of a small object, which is made inaccessible in forked children that get no pins.
pub(super) fn add_private(core: &Arc<ClientCore>, map: &Arc<PrivateMap>) {
    let mut registry = registry();
    registry.private.retain(|(_, map)| map.strong_count() > 0);
    registry.private.push((Arc::downgrade(core), Arc::downgrade(map)));
}

impl Registry {
    /// Returns all connections that hold pins: those of this process, and those inherited from its parent.
    fn holders(&self) -> Vec<PinHolder> {
        let cores = self.cores.iter().filter_map(Weak::upgrade).filter(|core| core.epoch.is_current());
        let own = cores.filter(|core| core.pins.in_use() > 0).map(|core| {
            let page = core.pins.cells().clone();
            PinHolder { core, page, arenas: Arc::default() }
        });
        own.chain(self.inherited.iter().cloned()).filter(|holder| !holder.core.has_ended()).collect()
    }

    /// Prepares the access of a forked child to the objects of one connection.
    fn access(&self, holder: &PinHolder, deadline: Deadline) -> ChildAccess {
        let socket = &holder.core.path;
        let transfer = match PageClaim::create(&holder.core, deadline) {
            Ok(claim) => PinTransfer::Claim(claim),
            // The store was killed, so its memory is never overwritten. The error `NotServed` alone does not prove this: the
            // socket file at the path may belong to another store.
            Err(Error::NotServed { .. }) if holder.core.is_peer_closed() => PinTransfer::NotNeeded,
            Err(error) => {
                let socket = socket.display();
                tracing::warn!(%socket, %error, "a forked child will not be able to read small objects");
                PinTransfer::Failed
            }
        };
        let of_core = |(core, map): &(Weak<ClientCore>, Weak<PrivateMap>)| {
            std::ptr::eq(core.as_ptr(), Arc::as_ptr(&holder.core)).then(|| map.upgrade()).flatten()
        };
        let private = self.private.iter().filter_map(of_core).collect();
        ChildAccess { transfer, arenas: Arc::default(), private }
    }
}

/// Fork hook that runs in the parent before the fork: gets pin pages for the child and copies the pins to them.
fn before() {
    // This hook may run twice for one fork. It cannot run in a thread that is exiting, whose thread-local data is destroyed.
    if !FORK.try_with(|fork| fork.borrow().is_none()).unwrap_or(false) {
        return;
    }
    let registry = registry();
    let deadline = Deadline::after(TIMEOUT);
    let (mut holders, mut accesses): (Vec<PinHolder>, Vec<ChildAccess>) = (Vec::new(), Vec::new());
    let mut paused: Vec<Arc<ClientCore>> = Vec::new();
    for round in 0..MAX_ROUNDS {
        let fresh: Vec<_> = registry
            .holders()
            .into_iter()
            .filter(|found| !holders.iter().any(|known| Arc::ptr_eq(&known.core, &found.core)))
            .collect();
        if round > 0 && fresh.is_empty() {
            break;
        }
        // New pins are allowed while the server answers, except in the last round.
        if round + 1 < MAX_ROUNDS {
            paused.drain(..).for_each(|core| core.pins.resume());
        }
        accesses.extend(fresh.iter().map(|holder| registry.access(holder, deadline)));
        holders.extend(fresh);
        paused = registry.cores.iter().filter_map(Weak::upgrade).collect();
        paused.retain(|core| core.epoch.is_current());
        paused.iter().for_each(|core| core.pins.pause());
    }
    for (holder, access) in holders.iter_mut().zip(&mut accesses) {
        if let PinTransfer::Claim(claim) = &access.transfer {
            pin::copy_pins(&holder.page, &claim.page);
        }
        holder.arenas = holder.arenas();
        access.arenas = Arc::clone(&holder.arenas);
    }
    let inherits = |(holder, access): (PinHolder, &ChildAccess)| match &access.transfer {
        PinTransfer::Claim(claim) => Some(PinHolder { page: claim.page.clone(), ..holder }),
        PinTransfer::NotNeeded | PinTransfer::Failed => None,
    };
    let inherited = holders.into_iter().zip(&accesses).filter_map(inherits).collect();
    FORK.set(Some(Fork { registry, accesses, inherited, paused }));
}

/// Takes the state of the fork that the hook `before` has prepared in this thread.
fn take_fork() -> Option<Fork> {
    FORK.try_with(RefCell::take).ok().flatten()
}

/// Fork hook that runs in the parent after the fork: allows new pins again.
fn in_parent() {
    let Some(fork) = take_fork() else { return };
    fork.paused.iter().for_each(|core| core.pins.resume());
    // The lock of the registry is released before the rest of the fork state is dropped, which may close the last clone of a
    // connection.
    drop(fork.registry);
}

/// Fork hook that runs in the child before `fork` returns: claims the child's pin pages.
fn in_child() {
    let Some(mut fork) = take_fork() else { return };
    let deadline = Deadline::after(TIMEOUT);
    for access in &fork.accesses {
        let is_held = match &access.transfer {
            PinTransfer::Claim(claim) => claim.claim(deadline),
            PinTransfer::NotNeeded => true,
            PinTransfer::Failed => false,
        };
        if !is_held {
            access.revoke();
        }
    }
    // The child frees no memory here, because another thread may have held the allocator's locks at the fork.
    std::mem::swap(&mut fork.registry.inherited, &mut fork.inherited);
    let Fork { registry, accesses, inherited, paused } = fork;
    // The buffer of the list `accesses` is leaked, because freeing it could deadlock in the child.
    let mut accesses = std::mem::ManuallyDrop::new(accesses);
    for access in accesses.drain(..) {
        let ChildAccess { transfer, arenas, private } = access;
        if let PinTransfer::Claim(PageClaim { page, connection, request, granted, .. }) = transfer {
            drop(connection);
            std::mem::forget((page, request, granted));
        }
        std::mem::forget((arenas, private));
    }
    std::mem::forget((inherited, paused));
    drop(registry);
}

impl ChildAccess {
    fn revoke(&self) {
        let arenas = self.arenas.iter().map(|arena| arena.revoke_in_child().is_ok());
        let private = self.private.iter().map(|map| map.revoke().is_ok());
        if !arenas.chain(private).all(|is_revoked| is_revoked) {
            // The child must not read the bytes of other objects in place of the inherited ones.
            std::process::abort();
        }
    }
}

impl PageClaim {
    /// Obtains a pin page (memory that marks the objects in use) for a forked child from the server. Runs in the parent
    /// before the fork.
    fn create(core: &ClientCore, deadline: Deadline) -> Result<Self> {
        let (mut connection, welcome) = loop {
            match core.connect_again(deadline) {
                // The parent tries again, because connections of other forked children may be about to close.
                Err(Error::Refused(Refusal::ClientLimit { .. } | Refusal::NoDescriptors))
                    if !deadline.has_passed() =>
                {
                    std::thread::sleep(RETRY);
                }
                connected => break connected?,
            }
        };
        let pins = SharedMap::create(&Memfd::import(welcome.pins, PINS_LEN)?, Protection::ReadWrite)?;
        let page = MappedCells::new(pins);
        let mut bytes = [0; 8];
        rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
            .map_err(|errno| wholemem_os::Error::Call { call: "getrandom", errno })?;
        // A secret of zero means that the pin page has no secret.
        let secret = u64::from_ne_bytes(bytes).max(1);
        pin::set_secret(&page, secret);
        connection.request(RequestKind::AwaitChild, &[], deadline)?;
        let kind = RequestKind::Claim { client: welcome.client, secret };
        Ok(Self {
            page,
            connection: connection.into_socket()?,
            address: Address::Path(core.path.clone()).encode()?,
            request: packet(&Request { id: CLAIM_ID, resends: 0, kind })?,
            granted: packet(&Response { id: CLAIM_ID, answer: Answer::Done })?,
        })
    }

    /// Claims the pin page of a forked child: asks the server to keep the page valid while the child lives. Runs in the
    /// child. Returns true if the child's objects are safe to read.
    fn claim(&self, deadline: Deadline) -> bool {
        loop {
            match self.try_claim(deadline) {
                Ok(is_granted) => return is_granted,
                // A store that has ended never overwrites the memory of its objects.
                Err(_) if self.connection.is_closed() == Ok(true) => return true,
                Err(_) if deadline.has_passed() => return false,
                // The child tries again: the server is being replaced, or the backlog of its socket is full.
                Err(_) => std::thread::sleep(RETRY),
            }
        }
    }

    fn try_claim(&self, deadline: Deadline) -> Result<bool, wholemem_os::Error> {
        let socket = PacketSocket::connect_encoded(&self.address)?;
        socket.send(&self.request, &[], deadline)?;
        // The buffer is longer than any response of the server that rejects the claim of a pin page.
        let mut answer = [0; 1024];
        let len = socket.recv(&mut answer, deadline)?;
        match frame::peek_id(&answer[..len]) {
            Some(CLAIM_ID) => Ok(answer[..len] == self.granted[..]),
            // The server refused the connection before it read the claim, because it cannot accept another connection now.
            _ => Err(wholemem_os::Error::Closed),
        }
    }
}

/// Encodes a short message of the store's protocol as one packet.
fn packet(message: &impl serde::Serialize) -> Result<Vec<u8>> {
    let packets = frame::encode(message, &[]).map_err(|malformed| Error::Protocol { rule: malformed.0 })?;
    let [packet] =
        <[_; 1]>::try_from(packets).map_err(|_| Error::Protocol { rule: "a claim fits one packet" })?;
    Ok(packet)
}
