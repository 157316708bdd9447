//! Pins of forked children: a child holds the objects that it inherits from the moment at which `fork` returns in it.
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

/// The timeout for the server, before the fork and after it.
const TIMEOUT: Duration = Duration::from_secs(10);

/// The delay between two attempts to connect.
const RETRY: Duration = Duration::from_millis(1);

/// The id of the only request of a child's connection.
const CLAIM_ID: u64 = 1;

/// The number of rounds for clients that take their first pin during the preparation of the fork.
const MAX_ROUNDS: usize = 4;

static HOOKS: ForkHooks = ForkHooks { before, in_parent, in_child };

static REGISTRY: Mutex<Registry> =
    Mutex::new(Registry { cores: Vec::new(), private: Vec::new(), inherited: Vec::new() });

thread_local! {
    /// The fork that this thread is executing.
    static FORK: RefCell<Option<Fork>> = const { RefCell::new(None) };
}

/// The connections and maps that children inherit. The hooks hold the lock during the fork, so that it is not held by another
/// thread in a child.
#[derive(Debug)]
struct Registry {
    cores: Vec<Weak<ClientCore>>,
    /// Copy-on-write maps of small objects.
    private: Vec<(Weak<ClientCore>, Weak<PrivateMap>)>,
    /// Pages that this process has inherited itself.
    inherited: Vec<PinHolder>,
}

/// A connection with pins and its pin page: the process's own, or one that it has inherited and claimed.
#[derive(Debug, Clone)]
struct PinHolder {
    core: Arc<ClientCore>,
    page: MappedCells,
    /// The arenas of the inherited objects. They are stored here because finding them takes a lock, which a thread that does not
    /// exist in the child may hold.
    arenas: Arc<[Arc<Mapping>]>,
}

impl PinHolder {
    /// The arenas that contain the pinned objects.
    fn arenas(&self) -> Arc<[Arc<Mapping>]> {
        let core = &self.core;
        if core.epoch.is_current() { core.maps.arenas(&core.index).into() } else { Arc::clone(&self.arenas) }
    }
}

/// The state of a fork in progress, from `before` to `in_parent` or `in_child`.
#[derive(Debug)]
struct Fork {
    registry: MutexGuard<'static, Registry>,
    accesses: Vec<ChildAccess>,
    /// The pages that the child will have inherited.
    inherited: Vec<PinHolder>,
    /// The connections on which new pins are blocked until the fork is complete.
    paused: Vec<Arc<ClientCore>>,
}

/// How a child gets access to the pinned objects of one connection.
#[derive(Debug)]
struct ChildAccess {
    transfer: PinTransfer,
    /// The memory that is made inaccessible in the child if it does not get its pins.
    arenas: Arc<[Arc<Mapping>]>,
    private: Vec<Arc<PrivateMap>>,
}

/// How the pinned objects stay valid for the child.
#[derive(Debug)]
enum PinTransfer {
    /// A pin page that the child claims.
    Claim(PageClaim),
    /// The store has ended, so that its memory is never overwritten.
    NotNeeded,
    /// No pins could be obtained: the child must not read small objects.
    Failed,
}

/// The data that a child needs to claim its page, all prepared before the fork.
#[derive(Debug)]
struct PageClaim {
    page: MappedCells,
    /// The connection that keeps the pin page valid until it is claimed.
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
    // Connections that were inherited from a parent do not belong to this process.
    registry.cores.retain(|core| core.upgrade().is_some_and(|core| core.epoch.is_current()));
    registry.cores.push(Arc::downgrade(core));
    Ok(())
}

/// Registers a copy-on-write map of an object.
pub(super) fn add_private(core: &Arc<ClientCore>, map: &Arc<PrivateMap>) {
    let mut registry = registry();
    registry.private.retain(|(_, map)| map.strong_count() > 0);
    registry.private.push((Arc::downgrade(core), Arc::downgrade(map)));
}

impl Registry {
    /// All connections with pins: those of this process, and inherited ones.
    fn holders(&self) -> Vec<PinHolder> {
        let cores = self.cores.iter().filter_map(Weak::upgrade).filter(|core| core.epoch.is_current());
        let own = cores.filter(|core| core.pins.in_use() > 0).map(|core| {
            let page = core.pins.cells().clone();
            PinHolder { core, page, arenas: Arc::default() }
        });
        own.chain(self.inherited.iter().cloned()).filter(|holder| !holder.core.has_ended()).collect()
    }

    /// Prepares the access of a child to the objects of one connection.
    fn access(&self, holder: &PinHolder, deadline: Deadline) -> ChildAccess {
        let socket = &holder.core.path;
        let transfer = match PageClaim::create(&holder.core, deadline) {
            Ok(claim) => PinTransfer::Claim(claim),
            // The store was killed, so its memory is never overwritten. `NotServed` alone does not prove that: the file at the
            // path may belong to another store.
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

/// Fork hook in the parent, before the fork: gets pin pages for the child and copies the pins.
fn before() {
    // May run twice for one fork. In a thread that is exiting, whose thread-local data is destroyed, it cannot run.
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
        // In the last round, new pins stay blocked while the server answers.
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

/// Takes the fork that `before` has prepared in this thread.
fn take_fork() -> Option<Fork> {
    FORK.try_with(RefCell::take).ok().flatten()
}

/// Fork hook in the parent, after the fork: allows new pins again.
fn in_parent() {
    let Some(fork) = take_fork() else { return };
    fork.paused.iter().for_each(|core| core.pins.resume());
    // Releases the lock before the rest is dropped, which may close the last clone of a connection.
    drop(fork.registry);
}

/// Fork hook in the child, before `fork` returns: claims the pin pages.
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
    // Nothing is freed here: another thread may have held the allocator's locks at the fork.
    std::mem::swap(&mut fork.registry.inherited, &mut fork.inherited);
    let Fork { registry, accesses, inherited, paused } = fork;
    // The buffer of the list is leaked, because freeing it could deadlock.
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
            // The child must not read the bytes of other objects in place of these.
            std::process::abort();
        }
    }
}

impl PageClaim {
    /// Obtains a pin page for a child. Runs in the parent.
    fn create(core: &ClientCore, deadline: Deadline) -> Result<Self> {
        let (mut connection, welcome) = loop {
            match core.connect_again(deadline) {
                // Connections of other children may be about to close.
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
        // Zero means that there is no secret.
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

    /// Claims the page. Runs in the child. Returns whether the child's objects are safe to read.
    fn claim(&self, deadline: Deadline) -> bool {
        loop {
            match self.try_claim(deadline) {
                Ok(is_granted) => return is_granted,
                // A store that has ended never overwrites memory.
                Err(_) if self.connection.is_closed() == Ok(true) => return true,
                Err(_) if deadline.has_passed() => return false,
                // The server is being replaced, or the backlog of its socket is full.
                Err(_) => std::thread::sleep(RETRY),
            }
        }
    }

    fn try_claim(&self, deadline: Deadline) -> Result<bool, wholemem_os::Error> {
        let socket = PacketSocket::connect_encoded(&self.address)?;
        socket.send(&self.request, &[], deadline)?;
        // The buffer is longer than any response that rejects a page claim.
        let mut answer = [0; 1024];
        let len = socket.recv(&mut answer, deadline)?;
        match frame::peek_id(&answer[..len]) {
            Some(CLAIM_ID) => Ok(answer[..len] == self.granted[..]),
            // The connection was refused before the claim was read, because the server cannot accept another one now.
            _ => Err(wholemem_os::Error::Closed),
        }
    }
}

/// Encodes a short message as one packet.
fn packet(message: &impl serde::Serialize) -> Result<Vec<u8>> {
    let packets = frame::encode(message, &[]).map_err(|malformed| Error::Protocol { rule: malformed.0 })?;
    let [packet] =
        <[_; 1]>::try_from(packets).map_err(|_| Error::Protocol { rule: "a claim fits one packet" })?;
    Ok(packet)
}
