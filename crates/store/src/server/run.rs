//! The server's loop: one thread that reads, steps, and does what the machine says, and never waits for a client.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{AsFd, OwnedFd};
use std::process::Child;
use std::rc::Rc;
use std::time::{Duration, Instant, SystemTime};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use wholemem_hal::Backend;
use wholemem_os::packet::{MAX_PACKET, PacketListener};
use wholemem_os::vm::Protection;
use wholemem_os::{Deadline, Error as OsError, Memfd, PacketSocket, PidFd, SharedMap, memfd};

use super::connection::{Connection, Heard, MOST_FOR_ALL, Standing};
use super::door::Door;
use super::machine::{Input, Now, Output, Server, Settings};
use super::outbox::{Flushed, Outbox};
use super::recover::Survivors;
use super::workers::{Done, Job, Workers};
use super::yard::{Closing, Yard};
use crate::cells::MappedCells;
use crate::id::{AllocationId, ClientId};
use crate::index::{Geometry, Index};
use crate::keeper::{Kept, Key, Launch, Role, ToKeeper, ToServer};
use crate::protocol::{Answer, Ask, Response};
use crate::{Error, Result};

/// How long a server without a keeper waits before it tries again to start one, and one without a free descriptor
/// before it looks for clients again.
const RETRY: Duration = Duration::from_millis(500);

/// How long the keeper may take to answer. One that has no descriptor left never does.
const PARKING: Duration = Duration::from_secs(5);

/// The keeper's end of this server.
#[derive(Debug)]
struct Keeper {
    socket: PacketSocket,
    outbox: Outbox,
    /// Where it was started by this process, and is to be reaped.
    child: Option<Child>,
}

/// What waits until the keeper has something.
#[derive(Debug)]
enum Parking {
    Memory(AllocationId),
    Client(ClientId),
}

/// Everything a running server has.
struct Loop<'a> {
    server: Server<MappedCells>,
    index: Memfd,
    devices: Vec<[u8; 16]>,
    /// Its own user, from whom descriptors are taken.
    user: u32,
    yard: Yard,
    connections: BTreeMap<ClientId, Connection>,
    /// How much waits for those clients that do not read.
    excess: usize,
    /// Room for what is being received.
    packet: Vec<u8>,
    next_client: u64,
    door: Door,
    keeper: Option<Keeper>,
    /// What the keeper was given, by its first key, and when.
    parking: BTreeMap<u64, (Parking, Instant)>,
    places: BTreeMap<AllocationId, u32>,
    /// The descriptor that came along with what was heard last.
    offered: Option<OwnedFd>,
    workers: Workers,
    launch: &'a Launch<'a>,
    start: Instant,
    /// When to try again what could not be done for want of a keeper or of descriptors.
    retry_at: Option<Instant>,
    is_accepting: bool,
    is_stopping: bool,
}

/// Serves until the keeper at the other end of the socket says to stop.
pub(crate) fn run(
    socket: PacketSocket,
    settings: Settings,
    geometry: Geometry,
    devices: Option<&Backend>,
    launch: &Launch<'_>,
) -> Result<()> {
    wholemem_os::descriptors::raise_limit();
    let kept = Kept::receive(&socket)?;
    let mut running = Loop::take_over(kept, socket, settings, geometry, devices, launch)?;
    running.tell_keeper(&ToKeeper::Ready, Vec::new());
    while !running.is_stopping {
        running.turn()?;
    }
    // Whoever has it mapped would find names in it for ever.
    running.server.index().supersede();
    Ok(())
}

impl<'a> Loop<'a> {
    fn take_over(
        mut kept: Kept,
        socket: PacketSocket,
        mut settings: Settings,
        geometry: Geometry,
        devices: Option<&Backend>,
        launch: &'a Launch<'a>,
    ) -> Result<Self> {
        let listener = kept.take(Key::Listener).ok_or(Error::Incomplete { what: "the listening socket" })?;
        let door = Door::new(PacketListener::adopt(listener, None)?);
        let mut keeper = Keeper { socket, outbox: Outbox::default(), child: None };
        let (index, cells) = match kept.take(Key::Index) {
            Some(fd) => open_index(fd)?,
            None => make_index(geometry, settings.host.quota, &mut keeper)?,
        };
        // What is available is less now than it was for the first server, by what objects have taken.
        settings.limit_host(cells.quota());
        let mut yard = Yard::default();
        let mut connections = BTreeMap::new();
        let (mut allocations, mut clients) = (BTreeMap::new(), BTreeSet::new());
        let mut rest = Kept::default();
        for (key, fd) in kept.into_iter() {
            match key {
                Key::Allocation(allocation) => drop(allocations.insert(allocation, fd)),
                Key::Socket(client) | Key::Pins(client) | Key::Process(client) => {
                    clients.insert(client);
                    rest.insert(key, fd);
                }
                Key::Index | Key::Listener | Key::Server => {}
            }
        }
        for client in clients {
            let taken = Connection::take_over(client, &mut rest).and_then(|connection| {
                connection.as_ref().map(|known| yard.add_pins(client, &known.pins)).transpose()?;
                Ok(connection)
            });
            match taken {
                Ok(connection) => connections.extend(connection.map(|connection| (client, connection))),
                // Whatever is wrong with one client is no reason to serve none.
                Err(error) => tracing::error!(%client, %error, "a client cannot be taken over"),
            }
        }
        let users = |(client, connection): (&ClientId, &Connection)| (*client, connection.user);
        let survivors = Survivors {
            allocations: allocations.keys().copied().collect(),
            clients: connections.iter().map(users).collect(),
        };
        for (allocation, fd) in allocations {
            let record = cells.allocation(allocation);
            let added = yard.add(allocation, fd, record.is_none_or(|record| record.place == 0));
            let is_arena = record.is_some_and(|record| record.is_arena);
            let mut opened = || if is_arena { yard.open_for_reading(allocation) } else { Ok(()) };
            if let Err(error) = added.and_then(|()| opened()) {
                tracing::error!(%allocation, %error, "memory cannot be opened for reading yet");
            }
        }
        let (device_ids, user) = (settings.devices.clone(), settings.user);
        let start = Instant::now();
        let (server, outputs) = Server::recover(cells, settings, &survivors, now(start), &mut yard);
        let next_client = server.index().epoch() << 32;
        let mut running = Self {
            server,
            index,
            devices: device_ids,
            user,
            yard,
            connections,
            excess: 0,
            packet: vec![0; MAX_PACKET],
            next_client,
            door,
            keeper: Some(keeper),
            parking: BTreeMap::new(),
            places: BTreeMap::new(),
            offered: None,
            workers: Workers::start(devices)?,
            launch,
            start,
            retry_at: None,
            is_accepting: true,
            is_stopping: false,
        };
        running.act(outputs);
        Ok(running)
    }

    /// Waits for something to happen, and does what follows from it.
    fn turn(&mut self) -> Result<()> {
        let ready = self.wait()?;
        if self.retry_at.is_some_and(|at| at <= Instant::now()) {
            self.retry_at = None;
            self.is_accepting = true;
            if self.keeper.is_none() {
                self.start_keeper();
            }
        }
        if ready.keeper {
            self.hear_keeper();
        }
        self.give_up_parking();
        if ready.workers {
            self.collect();
        }
        for client in ready.gone {
            self.gone(client);
        }
        for client in ready.heard {
            self.hear(client);
        }
        if ready.came {
            self.accept();
        }
        if self.server.wake_at().is_some_and(|at| at <= self.start.elapsed()) {
            self.step(Input::Tick);
        }
        self.connections.values_mut().for_each(Connection::flush);
        self.excess = self.connections.values().map(Connection::excess).sum();
        let broken = |keeper: &mut Keeper| keeper.outbox.flush(&keeper.socket) == Flushed::Broken;
        if self.keeper.as_mut().is_some_and(broken) {
            self.lose_keeper();
        }
        Ok(())
    }

    fn step(&mut self, input: Input<'_>) {
        let outputs = self.server.step(now(self.start), input, &mut self.yard);
        self.act(outputs);
    }

    /// Does what the machine says.
    fn act(&mut self, outputs: Vec<Output>) {
        for output in outputs {
            match output {
                Output::Say { client, response, share } => {
                    let shared = share.map(|share| self.yard.share(share)).transpose();
                    match shared {
                        Ok(fd) => self.say(client, &response, fd.flatten().into_iter().collect()),
                        Err(error) => {
                            let reason = error.to_string();
                            let refusal = crate::Refusal::NoMemory { len: 0, reason };
                            let answer = Answer::Refused(refusal);
                            self.say(client, &Response { id: response.id, answer }, Vec::new());
                        }
                    }
                }
                Output::Welcome { client, request } => self.welcome(client, request),
                Output::Make { allocation, len, place } => {
                    self.places.insert(allocation, place);
                    self.workers.add(Job::Make { allocation, len, place });
                }
                Output::TakeIn { allocation, len, place } => {
                    self.places.insert(allocation, place);
                    self.workers.add(Job::LookAt { allocation, len, place, fd: self.offered.take() });
                }
                Output::CloseForWriting { allocation, at_once } => {
                    match self.yard.close(allocation, at_once) {
                        Closing::Over(outcome) => self.step(Input::Closed { allocation, outcome }),
                        Closing::Takes(fd) => self.workers.add(Job::Close { allocation, fd }),
                    }
                }
                Output::Release { allocation } => {
                    self.yard.remove(allocation);
                    self.places.remove(&allocation);
                    let keys = vec![Key::Allocation(allocation).encode()];
                    self.tell_keeper(&ToKeeper::Unpark(keys), Vec::new());
                }
                Output::Dismiss { client } => self.close(client),
            }
        }
    }

    fn say(&mut self, client: ClientId, response: &Response, fds: Vec<Rc<OwnedFd>>) {
        let Some(connection) = self.connections.get_mut(&client) else { return };
        let before = connection.excess();
        let standing = connection.say(response, fds);
        self.excess = (self.excess + connection.excess()).saturating_sub(before);
        let is_bad = match standing {
            Standing::Good => false,
            Standing::Slow => self.excess > MOST_FOR_ALL,
            Standing::Bad => true,
        };
        if is_bad {
            self.close(client);
        }
    }

    fn welcome(&mut self, client: ClientId, id: u64) {
        let Some(connection) = self.connections.get(&client) else { return };
        let fds = self.index.read_only_fd().and_then(|index| Ok([index, connection.pins.share_fd()?]));
        let Ok(fds) = fds else { return self.close(client) };
        let (index_len, devices) = (self.index.len() as u64, self.devices.clone());
        let answer = Answer::Welcome { client, index_len, devices };
        self.say(client, &Response { id, answer }, fds.into_iter().map(Rc::new).collect());
    }

    fn hear(&mut self, client: ClientId) {
        let Some(connection) = self.connections.get_mut(&client) else { return };
        let mut packet = std::mem::take(&mut self.packet);
        match connection.hear(&mut packet, self.user) {
            Some(Heard::Request(request, ..)) if request.ask == Ask::Goodbye => self.gone(client),
            Some(Heard::Request(request, payload, fd)) => {
                self.offered = fd;
                self.step(Input::Asked { client, request, payload });
                self.offered = None;
            }
            Some(Heard::End) => self.close(client),
            None => {}
        }
        self.packet = packet;
    }

    /// Takes in everybody who waits at the door.
    fn accept(&mut self) {
        loop {
            let accepted = match self.door.next() {
                Ok(None) => return,
                Ok(Some(socket)) => Connection::accept(socket),
                Err(error) => Err(error),
            };
            let parked = accepted.and_then(|connection| {
                let client = ClientId(self.next_client);
                let fds = connection.park(client)?;
                self.yard.add_pins(client, &connection.pins)?;
                Ok((client, connection, fds))
            });
            match parked {
                Ok((client, connection, fds)) => {
                    self.next_client += 1;
                    let user = connection.user;
                    self.connections.insert(client, connection);
                    self.step(Input::Joined { client, user });
                    self.park(Parking::Client(client), fds);
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot take in a client");
                    self.is_accepting = false;
                    self.retry_at = Some(Instant::now() + RETRY);
                    return;
                }
            }
        }
    }

    /// A connection is at its end. What its process holds stays until that has ended too.
    fn close(&mut self, client: ClientId) {
        let Some(connection) = self.connections.get_mut(&client) else { return };
        connection.close();
        if connection.process.is_none() {
            return self.gone(client);
        }
        self.tell_keeper(&ToKeeper::Unpark(vec![Key::Socket(client).encode()]), Vec::new());
    }

    /// A client holds nothing any more.
    fn gone(&mut self, client: ClientId) {
        if self.connections.remove(&client).is_none() {
            return;
        }
        self.yard.remove_pins(client);
        self.step(Input::Left { client });
        let keys = [Key::Socket(client), Key::Pins(client), Key::Process(client)];
        self.tell_keeper(&ToKeeper::Unpark(keys.map(Key::encode).to_vec()), Vec::new());
    }

    /// What the workers have done.
    fn collect(&mut self) {
        for done in self.workers.done() {
            match done {
                Done::Closed { allocation, outcome } => {
                    if outcome.is_ok() {
                        self.yard.closed(allocation);
                    }
                    self.step(Input::Closed { allocation, outcome });
                }
                Done::Made { allocation, outcome: Err(reason) } => {
                    self.step(Input::Made { allocation, outcome: Err(reason) });
                }
                Done::Made { allocation, outcome: Ok(fd) } => {
                    let is_host = self.places.remove(&allocation) == Some(0);
                    let parked = memfd::share_fd(fd.as_fd());
                    match parked.and_then(|parked| self.yard.add(allocation, fd, is_host).map(|()| parked)) {
                        Ok(parked) => {
                            let fds = vec![(Key::Allocation(allocation), parked)];
                            self.park(Parking::Memory(allocation), fds);
                        }
                        Err(error) => {
                            self.step(Input::Made { allocation, outcome: Err(error.to_string()) });
                        }
                    }
                }
            }
        }
    }

    /// Gives descriptors to the keeper, and goes on when it has them.
    fn park(&mut self, what: Parking, fds: Vec<(Key, OwnedFd)>) {
        let Some(first) = fds.first().map(|(key, _)| key.encode()) else { return };
        if self.keeper.is_none() {
            return self.parked(what);
        }
        self.parking.insert(first, (what, Instant::now()));
        let keys = fds.iter().map(|(key, _)| key.encode()).collect();
        self.tell_keeper(&ToKeeper::Park(keys), fds.into_iter().map(|(_, fd)| Rc::new(fd)).collect());
    }

    fn parked(&mut self, what: Parking) {
        match what {
            Parking::Memory(allocation) => self.step(Input::Made { allocation, outcome: Ok(()) }),
            Parking::Client(client) => {
                if let Some(connection) = self.connections.get_mut(&client) {
                    connection.is_parked = true;
                }
            }
        }
    }

    /// Gives up what the keeper has not taken in time.
    fn give_up_parking(&mut self) {
        let late = |(_, since): &(Parking, Instant)| since.elapsed() >= PARKING;
        let keys: Vec<_> =
            self.parking.iter().filter(|(_, parking)| late(parking)).map(|(key, _)| *key).collect();
        for what in keys.iter().filter_map(|key| self.parking.remove(key)).collect::<Vec<_>>() {
            match what.0 {
                Parking::Memory(allocation) => {
                    let outcome = Err("the keeper does not take it: has it descriptors left?".to_owned());
                    self.step(Input::Made { allocation, outcome });
                }
                Parking::Client(client) => self.gone(client),
            }
        }
    }

    fn tell_keeper(&mut self, what: &ToKeeper, fds: Vec<Rc<OwnedFd>>) {
        if let (Some(keeper), Ok(bytes)) = (&mut self.keeper, postcard::to_allocvec(what)) {
            keeper.outbox.push(vec![bytes], fds);
        }
    }

    fn hear_keeper(&mut self) {
        loop {
            let Some(keeper) = &self.keeper else { return };
            match keeper.socket.recv(&mut self.packet, Deadline::NOW) {
                Ok(len) => match postcard::from_bytes(&self.packet[..len]) {
                    Ok(ToServer::Parked(keys)) => {
                        let parked = keys.iter().filter_map(|key| self.parking.remove(key));
                        for (what, _) in parked.collect::<Vec<_>>() {
                            self.parked(what);
                        }
                    }
                    Ok(ToServer::Stop) => self.is_stopping = true,
                    Err(_) => return self.lose_keeper(),
                },
                Err(OsError::TimedOut) => return,
                Err(_) => return self.lose_keeper(),
            }
        }
    }

    /// The keeper is dead. Until there is another, the memory lives and dies with this process.
    fn lose_keeper(&mut self) {
        tracing::warn!("the keeper is dead: unprotected until another one runs");
        if let Some(mut child) = self.keeper.take().and_then(|keeper| keeper.child) {
            let _ = child.wait();
        }
        for (what, _) in std::mem::take(&mut self.parking).into_values() {
            self.parked(what);
        }
        self.start_keeper();
    }

    fn start_keeper(&mut self) {
        let started = self.everything().and_then(|kept| {
            let (socket, theirs) = PacketSocket::pair()?;
            let child =
                (self.launch)(Role::Keeper, theirs.into()).map_err(|source| Error::Launch { source })?;
            kept.send(&socket)?;
            Ok(Keeper { socket, outbox: Outbox::default(), child: Some(child) })
        });
        match started {
            Ok(keeper) => self.keeper = Some(keeper),
            Err(error) => {
                tracing::error!(%error, "cannot start a keeper");
                self.retry_at = Some(Instant::now() + RETRY);
            }
        }
    }

    /// Everything a keeper has to have.
    fn everything(&self) -> Result<Kept> {
        let mut kept = Kept::default();
        kept.insert(Key::Index, self.index.share_fd()?);
        kept.insert(Key::Listener, self.door.share_fd()?);
        kept.insert(Key::Server, PidFd::of_self()?.into());
        for (allocation, fd) in self.yard.fds() {
            kept.insert(Key::Allocation(allocation), memfd::share_fd(fd.as_fd())?);
        }
        for (client, connection) in &self.connections {
            for (key, fd) in connection.park(*client)? {
                kept.insert(key, fd);
            }
        }
        Ok(kept)
    }

    fn wait(&self) -> Result<Ready> {
        let mut polls = vec![PollFd::new(self.workers.bell(), PollFlags::IN)];
        let mut who = vec![Source::Workers];
        if let Some(keeper) = &self.keeper {
            let out = if keeper.outbox.is_empty() { PollFlags::empty() } else { PollFlags::OUT };
            polls.push(PollFd::new(&keeper.socket, PollFlags::IN | out));
            who.push(Source::Keeper);
        }
        if self.is_accepting {
            polls.push(PollFd::new(&self.door, PollFlags::IN));
            who.push(Source::Listener);
        }
        for (client, connection) in &self.connections {
            if let (Some(socket), true) = (&connection.socket, connection.is_parked) {
                let out = if connection.has_to_say() { PollFlags::OUT } else { PollFlags::empty() };
                polls.push(PollFd::new(socket, PollFlags::IN | out));
                who.push(Source::Client(*client));
            }
            if let Some(process) = &connection.process {
                polls.push(PollFd::new(process, PollFlags::IN));
                who.push(Source::Process(*client));
            }
        }
        let wake = self.server.wake_at().map(|at| at.saturating_sub(self.start.elapsed()));
        let retry = self.retry_at.map(|at| at.saturating_duration_since(Instant::now()));
        let parking = self.parking.values().map(|(_, since)| PARKING.saturating_sub(since.elapsed())).min();
        let timeout =
            wake.into_iter().chain(retry).chain(parking).min().and_then(|left| Timespec::try_from(left).ok());
        match poll(&mut polls, timeout.as_ref()) {
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(errno) => return Err(OsError::Call { call: "poll", errno }.into()),
        }
        let mut ready = Ready::default();
        let happened = polls.iter().zip(who).filter(|(poll, _)| !poll.revents().is_empty());
        for (poll, source) in happened {
            let is_readable = poll.revents().intersects(PollFlags::IN | PollFlags::HUP | PollFlags::ERR);
            match source {
                Source::Workers => ready.workers = true,
                Source::Keeper => ready.keeper = is_readable,
                Source::Listener => ready.came = true,
                Source::Client(client) if is_readable => ready.heard.push(client),
                Source::Process(client) => ready.gone.push(client),
                Source::Client(_) => {}
            }
        }
        Ok(ready)
    }
}

#[derive(Debug)]
enum Source {
    Workers,
    Keeper,
    Listener,
    Client(ClientId),
    Process(ClientId),
}

/// What has happened.
#[derive(Debug, Default)]
struct Ready {
    keeper: bool,
    workers: bool,
    came: bool,
    heard: Vec<ClientId>,
    gone: Vec<ClientId>,
}

fn now(start: Instant) -> Now {
    let unix = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    Now { elapsed: start.elapsed(), unix: u64::try_from(unix.as_millis()).unwrap_or(u64::MAX) }
}

fn open_index(fd: OwnedFd) -> Result<(Memfd, Index<MappedCells>)> {
    let len = memfd::len_of(fd.as_fd())?;
    let memory = Memfd::import(fd, len)?;
    let cells = MappedCells::new(SharedMap::create(&memory, Protection::ReadWrite)?);
    Ok((memory, Index::open(cells)?))
}

/// Makes the index of a new store, and waits until the keeper has it.
fn make_index(geometry: Geometry, quota: u64, keeper: &mut Keeper) -> Result<(Memfd, Index<MappedCells>)> {
    let memory = Memfd::create_sparse("wholemem-index", geometry.len())?;
    let cells = MappedCells::new(SharedMap::create(&memory, Protection::ReadWrite)?);
    let index = Index::format(cells, geometry);
    index.set_quota(quota);
    let park = postcard::to_allocvec(&ToKeeper::Park(vec![Key::Index.encode()]));
    let park = park.map_err(|_| Error::Protocol { rule: "a word for the keeper cannot be encoded" })?;
    keeper.socket.send(&park, &[memory.as_fd()], Deadline::NEVER)?;
    keeper.socket.recv(&mut [0; MAX_PACKET], Deadline::NEVER)?;
    Ok((memory, index))
}
