//! Pins of forked children: a child holds what it has inherited from the moment on at which `fork` returns to it.
//!
//! ```text
//!   parent, before the fork     connects once more, says `await child`: a page of pins that is held while this connection is
//!                               open; lets no thread take a pin; copies all its pins to that page
//!   parent, after the fork      closes its end, and goes on
//!   child, before `fork`        connects, says `claim`: from the answer on the page is held while the child's process lives;
//!   returns to it               closes both
//! ```
//!
//! So at no moment is an object that the child could read without a pin: first it is the parent's, then the connection's
//! that both have, then the child's. A child that forks itself does the same with the page that it has claimed.
//!
//! What it keeps true: if a child could not get its pins, because the server refuses or does not answer in time, then it
//! cannot read small objects at all: their memory is made inaccessible in it, and reading is a `SIGSEGV`. Large objects have
//! memory that is never used again, and stay readable. In a child nothing is allocated here before `fork` returns. Without
//! anything held a fork costs two locks.
//!
//! What it will not do: see children that are made without the C library's `fork`, or by a thread that is ending. Nor release pins before the child exits;
//! if it runs another program, they are held until that ends.

use std::cell::RefCell;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use wholemem_hal::Mapping;
use wholemem_os::fork::{self, ForkHooks};
use wholemem_os::packet::{Address, EncodedAddress};
use wholemem_os::vm::Protection;
use wholemem_os::{Deadline, Memfd, PacketSocket, PrivateMap, SharedMap};

use super::Core;
use crate::cells::MappedCells;
use crate::pin::{self, PINS_LEN};
use crate::protocol::{Answer, Ask, Request, Response, frame};
use crate::{Error, Refusal, Result};

/// How long a server may take, before the fork and after it.
const PATIENCE: Duration = Duration::from_secs(10);

/// How long to wait before connecting again.
const RETRY: Duration = Duration::from_millis(1);

/// The id of the only request of a child's connection.
const CLAIM_ID: u64 = 1;

/// How often pages are made for clients that began to hold something meanwhile.
const ROUNDS: usize = 4;

static HOOKS: ForkHooks = ForkHooks { before, in_parent, in_child };

static REGISTRY: Mutex<Registry> =
    Mutex::new(Registry { cores: Vec::new(), private: Vec::new(), inherited: Vec::new() });

thread_local! {
    /// The fork that this thread is at.
    static FORK: RefCell<Option<Fork>> = const { RefCell::new(None) };
}

/// What children inherit. The hooks hold its lock over the fork, so that it is free in a child.
#[derive(Debug)]
struct Registry {
    cores: Vec<Weak<Core>>,
    /// Copy-on-write maps of small objects.
    private: Vec<(Weak<Core>, Weak<PrivateMap>)>,
    /// What this process has itself inherited.
    inherited: Vec<Holder>,
}

/// A page of pins that this process has claimed, or one of its own: what is held for a connection.
#[derive(Debug, Clone)]
struct Holder {
    core: Arc<Core>,
    page: MappedCells,
    /// Where the small objects are that were inherited. No lock may be taken to find out: a thread that is not here any more
    /// may have it.
    arenas: Arc<[Arc<Mapping>]>,
}

impl Holder {
    /// Where the small objects are that it holds.
    fn arenas(&self) -> Arc<[Arc<Mapping>]> {
        let core = &self.core;
        if core.epoch.is_current() { core.maps.arenas(&core.index).into() } else { Arc::clone(&self.arenas) }
    }
}

/// A fork that is about to happen.
#[derive(Debug)]
struct Fork {
    registry: MutexGuard<'static, Registry>,
    passages: Vec<Passage>,
    /// What the child will have inherited.
    inherited: Vec<Holder>,
    /// Those whose pins cannot be taken until it has happened.
    paused: Vec<Arc<Core>>,
}

/// How the objects of one connection come to the child.
#[derive(Debug)]
struct Passage {
    held: Held,
    /// What is made inaccessible in the child if it cannot hold it.
    arenas: Arc<[Arc<Mapping>]>,
    private: Vec<Arc<PrivateMap>>,
}

/// What keeps the objects for the child.
#[derive(Debug)]
enum Held {
    /// A page of pins, when it has claimed it.
    By(Claim),
    /// Their store has ended, so that nothing is written over them.
    ForEver,
    /// Nothing does.
    Never,
}

/// What a child needs to claim its page, all of it made before the fork.
#[derive(Debug)]
struct Claim {
    page: MappedCells,
    /// Keeps the page until it is claimed.
    connection: PacketSocket,
    address: EncodedAddress,
    request: Vec<u8>,
    granted: Vec<u8>,
}

fn registry() -> MutexGuard<'static, Registry> {
    REGISTRY.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Has children of this process hold what this connection does.
pub(super) fn add(core: &Arc<Core>) -> Result<()> {
    fork::register(&HOOKS)?;
    let mut registry = registry();
    // Those of a parent are not of this process.
    registry.cores.retain(|core| core.upgrade().is_some_and(|core| core.epoch.is_current()));
    registry.cores.push(Arc::downgrade(core));
    Ok(())
}

/// Notes a copy-on-write map of an object of a connection.
pub(super) fn add_private(core: &Arc<Core>, map: &Arc<PrivateMap>) {
    let mut registry = registry();
    registry.private.retain(|(_, map)| map.strong_count() > 0);
    registry.private.push((Arc::downgrade(core), Arc::downgrade(map)));
}

impl Registry {
    /// What holds anything: connections of this process, and what it has inherited.
    fn holders(&self) -> Vec<Holder> {
        let cores = self.cores.iter().filter_map(Weak::upgrade).filter(|core| core.epoch.is_current());
        let own = cores.filter(|core| core.pins.in_use() > 0).map(|core| {
            let page = core.pins.cells().clone();
            Holder { core, page, arenas: Arc::default() }
        });
        own.chain(self.inherited.iter().cloned()).filter(|holder| !holder.core.is_over()).collect()
    }

    /// How the objects of a holder come to the child.
    fn passage(&self, holder: &Holder, deadline: Deadline) -> Passage {
        let socket = &holder.core.path;
        let held = match Claim::create(&holder.core, deadline) {
            Ok(claim) => Held::By(claim),
            // The store was killed: nothing is written over its objects. That no process listens at its path is not enough, since
            // the file there may be another store's.
            Err(Error::NotServed { .. }) if holder.core.is_at_its_end() => Held::ForEver,
            Err(error) => {
                let socket = socket.display();
                tracing::warn!(%socket, %error, "a forked child will not be able to read small objects");
                Held::Never
            }
        };
        let of_core = |(core, map): &(Weak<Core>, Weak<PrivateMap>)| {
            std::ptr::eq(core.as_ptr(), Arc::as_ptr(&holder.core)).then(|| map.upgrade()).flatten()
        };
        let private = self.private.iter().filter_map(of_core).collect();
        Passage { held, arenas: Arc::default(), private }
    }
}

/// The parent, before the fork.
fn before() {
    // It may run twice around one fork. In a thread that is ending, whose thread-local data is gone, it cannot run at all.
    if !FORK.try_with(|fork| fork.borrow().is_none()).unwrap_or(false) {
        return;
    }
    let registry = registry();
    let deadline = Deadline::after(PATIENCE);
    let (mut holders, mut passages): (Vec<Holder>, Vec<Passage>) = (Vec::new(), Vec::new());
    let mut paused: Vec<Arc<Core>> = Vec::new();
    for round in 0..ROUNDS {
        let fresh: Vec<_> = registry
            .holders()
            .into_iter()
            .filter(|found| !holders.iter().any(|known| Arc::ptr_eq(&known.core, &found.core)))
            .collect();
        if round > 0 && fresh.is_empty() {
            break;
        }
        // In the last round threads wait for the server too.
        if round + 1 < ROUNDS {
            paused.drain(..).for_each(|core| core.pins.resume());
        }
        passages.extend(fresh.iter().map(|holder| registry.passage(holder, deadline)));
        holders.extend(fresh);
        paused = registry.cores.iter().filter_map(Weak::upgrade).collect();
        paused.retain(|core| core.epoch.is_current());
        paused.iter().for_each(|core| core.pins.pause());
    }
    for (holder, passage) in holders.iter_mut().zip(&mut passages) {
        if let Held::By(claim) = &passage.held {
            pin::copy_pins(&holder.page, &claim.page);
        }
        holder.arenas = holder.arenas();
        passage.arenas = Arc::clone(&holder.arenas);
    }
    let inherits = |(holder, passage): (Holder, &Passage)| match &passage.held {
        Held::By(claim) => Some(Holder { page: claim.page.clone(), ..holder }),
        Held::ForEver | Held::Never => None,
    };
    let inherited = holders.into_iter().zip(&passages).filter_map(inherits).collect();
    FORK.set(Some(Fork { registry, passages, inherited, paused }));
}

/// What `before` has left for this thread.
fn taken() -> Option<Fork> {
    FORK.try_with(RefCell::take).ok().flatten()
}

/// The parent, after the fork.
fn in_parent() {
    let Some(fork) = taken() else { return };
    fork.paused.iter().for_each(|core| core.pins.resume());
    // Without the lock: the last of a connection may go here.
    drop(fork.registry);
}

/// The child, before `fork` returns to it.
fn in_child() {
    let Some(mut fork) = taken() else { return };
    let deadline = Deadline::after(PATIENCE);
    for passage in &fork.passages {
        let is_held = match &passage.held {
            Held::By(claim) => claim.make(deadline),
            Held::ForEver => true,
            Held::Never => false,
        };
        if !is_held {
            passage.revoke();
        }
    }
    // Nothing is freed here: an allocator's locks may have been another thread's.
    std::mem::swap(&mut fork.registry.inherited, &mut fork.inherited);
    let Fork { registry, passages, inherited, paused } = fork;
    // The list itself stays too.
    let mut passages = std::mem::ManuallyDrop::new(passages);
    for passage in passages.drain(..) {
        let Passage { held, arenas, private } = passage;
        if let Held::By(Claim { page, connection, request, granted, .. }) = held {
            drop(connection);
            std::mem::forget((page, request, granted));
        }
        std::mem::forget((arenas, private));
    }
    std::mem::forget((inherited, paused));
    drop(registry);
}

impl Passage {
    fn revoke(&self) {
        let arenas = self.arenas.iter().map(|arena| arena.revoke_in_child().is_ok());
        let private = self.private.iter().map(|map| map.revoke().is_ok());
        if !arenas.chain(private).all(|is_revoked| is_revoked) {
            // Other objects' bytes must not be read in place of these.
            std::process::abort();
        }
    }
}

impl Claim {
    /// Gets a page of pins for a child, in the parent.
    fn create(core: &Core, deadline: Deadline) -> Result<Self> {
        let (mut connection, greeting) = loop {
            match core.connect_again(deadline) {
                // Connections of other children may be about to end.
                Err(Error::Refused(Refusal::ClientLimit { .. } | Refusal::NoDescriptors))
                    if !deadline.has_passed() =>
                {
                    std::thread::sleep(RETRY);
                }
                connected => break connected?,
            }
        };
        let pins = SharedMap::create(&Memfd::import(greeting.pins, PINS_LEN)?, Protection::ReadWrite)?;
        let page = MappedCells::new(pins);
        let mut bytes = [0; 8];
        rustix::rand::getrandom(&mut bytes, rustix::rand::GetRandomFlags::empty())
            .map_err(|errno| wholemem_os::Error::Call { call: "getrandom", errno })?;
        // Zero is none.
        let secret = u64::from_ne_bytes(bytes).max(1);
        pin::set_secret(&page, secret);
        connection.request(Ask::AwaitChild, &[], deadline)?;
        let ask = Ask::Claim { client: greeting.client, secret };
        Ok(Self {
            page,
            connection: connection.into_socket()?,
            address: Address::Path(core.path.clone()).encode()?,
            request: packet(&Request { id: CLAIM_ID, again: 0, ask })?,
            granted: packet(&Response { id: CLAIM_ID, answer: Answer::Done })?,
        })
    }

    /// Claims it, in the child. False if the child does not hold it.
    fn make(&self, deadline: Deadline) -> bool {
        loop {
            match self.make_once(deadline) {
                Ok(is_granted) => return is_granted,
                // A store that has ended writes over nothing any more.
                Err(_) if self.connection.is_closed() == Ok(true) => return true,
                Err(_) if deadline.has_passed() => return false,
                // The server is being replaced, or too many wait for it.
                Err(_) => std::thread::sleep(RETRY),
            }
        }
    }

    fn make_once(&self, deadline: Deadline) -> Result<bool, wholemem_os::Error> {
        let socket = PacketSocket::connect_encoded(&self.address)?;
        socket.send(&self.request, &[], deadline)?;
        // Longer than any refusal of a claim.
        let mut answer = [0; 1024];
        let len = socket.recv(&mut answer, deadline)?;
        match frame::short_id(&answer[..len]) {
            Some(CLAIM_ID) => Ok(answer[..len] == self.granted[..]),
            // It was turned away before its claim was read, since the server has no room for one more connection now.
            _ => Err(wholemem_os::Error::Closed),
        }
    }
}

/// A short message, as one packet.
fn packet(message: &impl serde::Serialize) -> Result<Vec<u8>> {
    let packets = frame::encode(message, &[]).map_err(|malformed| Error::Protocol { rule: malformed.0 })?;
    let [packet] =
        <[_; 1]>::try_from(packets).map_err(|_| Error::Protocol { rule: "a claim is one packet" })?;
    Ok(packet)
}
