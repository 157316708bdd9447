//! Any number of file descriptors, each with its key, in batches that are answered one by one.
//!
//! The kernel counts the descriptors that a user has in flight and refuses more than his limit on open files
//! (`ETOOMANYREFS`), so that a batch is sent only when the one before it has been taken.

use std::os::fd::{BorrowedFd, OwnedFd};

use super::wire::{
    Answer, Batch, HEADER, KEY, broken, decode_answer, decode_batch, encode_answer, encode_batch,
};
use super::{MAX_FDS, PacketSocket};
use crate::width::{to_u64, to_usize};
use crate::{Deadline, Error, Result};

impl PacketSocket {
    /// Sends any number of file descriptors, each with its key, to a peer that calls
    /// [`recv_tagged`](Self::recv_tagged).
    ///
    /// Returns when the peer has them all. When the peer takes fewer ([`Error::TransferTooLarge`]) or cannot open
    /// them all ([`Error::FdsTruncated`]), it has closed those it got, and the connection can be used further.
    /// After any other error the two ends may be out of step, and the connection is best dropped.
    ///
    /// One transfer at a time: nothing else may be sent or received on either end meanwhile.
    ///
    /// ```
    /// use std::os::fd::AsFd;
    /// use wholemem_os::{Deadline, Error, PacketSocket};
    ///
    /// let (here, there) = PacketSocket::pair()?;
    /// std::thread::scope(|scope| {
    ///     scope.spawn(|| {
    ///         let fds: Vec<_> = (0..150).map(|key| (key, here.as_fd())).collect();
    ///         here.send_tagged(&fds, Deadline::NEVER)
    ///     });
    ///     let fds = there.recv_tagged(1000, Deadline::NEVER)?;
    ///     assert_eq!((fds.len(), fds[149].0), (150, 149));
    ///     Ok::<(), Error>(())
    /// })
    /// # ?;
    /// # Ok::<(), Error>(())
    /// ```
    #[doc(alias = "SCM_RIGHTS")]
    #[doc(alias = "ETOOMANYREFS")]
    pub fn send_tagged(&self, fds: &[(u64, BorrowedFd<'_>)], deadline: Deadline) -> Result<()> {
        let mut taken = 0;
        // A transfer of nothing is one batch of nothing.
        loop {
            let part = &fds[taken..fds.len().min(taken + MAX_FDS)];
            let batch = Batch {
                total: to_u64(fds.len()),
                first: to_u64(taken),
                keys: part.iter().map(|(key, _)| *key).collect(),
            };
            let descriptors: Vec<BorrowedFd<'_>> = part.iter().map(|(_, fd)| *fd).collect();
            self.send(&encode_batch(&batch), &descriptors, deadline)?;

            let mut reply = [0; HEADER];
            let len = self.recv(&mut reply, deadline)?;
            taken += part.len();
            match decode_answer(&reply[..len])? {
                Answer::Taken(count) if count == to_u64(taken) => {}
                Answer::Taken(_) => {
                    return broken("the answer to a batch counts other descriptors than were sent");
                }
                Answer::TooMany(limit) => {
                    return Err(Error::TransferTooLarge { count: fds.len(), limit: to_usize(limit) });
                }
                Answer::Lost(room) => return Err(Error::FdsTruncated { room: to_usize(room) }),
            }
            if taken == fds.len() {
                return Ok(());
            }
        }
    }

    /// Receives what a peer sends with [`send_tagged`](Self::send_tagged), if it is at most `limit` descriptors.
    ///
    /// On any error all descriptors that came are closed. A transfer beyond the limit, or beyond what this process
    /// may open, is refused to the peer, which gets the same error.
    ///
    /// The keys are the peer's: nothing says that they are distinct, or in order.
    #[doc(alias = "SCM_RIGHTS")]
    pub fn recv_tagged(&self, limit: usize, deadline: Deadline) -> Result<Vec<(u64, OwnedFd)>> {
        let mut taken: Vec<(u64, OwnedFd)> = Vec::new();
        let mut total = None;
        loop {
            let mut packet = [0; HEADER + MAX_FDS * KEY];
            // Room for no more than the limit, so that a peer can never fill our table beyond it.
            let room = MAX_FDS.min(limit - taken.len());
            let received = self.receive(&mut packet, room, deadline)?;
            let batch = decode_batch(&packet[..received.len])?;
            if *total.get_or_insert(batch.total) != batch.total || batch.first != to_u64(taken.len()) {
                return broken("a batch does not follow the one before it");
            }
            if batch.total > to_u64(limit) {
                self.send(&encode_answer(Answer::TooMany(to_u64(limit))), &[], deadline)?;
                return Err(Error::TransferTooLarge { count: to_usize(batch.total), limit });
            }
            if received.lost {
                self.send(&encode_answer(Answer::Lost(to_u64(batch.keys.len()))), &[], deadline)?;
                return Err(Error::FdsTruncated { room: batch.keys.len() });
            }
            if received.fds.len() != batch.keys.len() {
                return broken("a batch has another number of descriptors than of keys");
            }
            taken.extend(batch.keys.into_iter().zip(received.fds));
            self.send(&encode_answer(Answer::Taken(to_u64(taken.len()))), &[], deadline)?;
            if to_u64(taken.len()) == batch.total {
                return Ok(taken);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::fd::{AsFd, AsRawFd};
    use std::time::Duration;

    use rustix::event::{PollFd, PollFlags, poll};
    use rustix::pipe::{PipeFlags, pipe_with};
    use rustix::process::{Resource, getrlimit, setrlimit};

    use super::*;
    use crate::fork::child;

    fn patience() -> Deadline {
        Deadline::after(Duration::from_secs(60))
    }

    fn pair() -> (PacketSocket, PacketSocket) {
        PacketSocket::pair().expect("two sockets")
    }

    fn pipe() -> (OwnedFd, OwnedFd) {
        pipe_with(PipeFlags::CLOEXEC).expect("a pipe")
    }

    /// Waits, because a child that another test forks meanwhile keeps a copy for a moment.
    fn is_closed(reader: &OwnedFd) -> bool {
        let mut watched = [PollFd::new(reader, PollFlags::IN)];
        let timeout = patience().timeout();
        poll(&mut watched, timeout.as_ref()).expect("poll") == 1
            && watched[0].revents().contains(PollFlags::HUP)
    }

    fn tagged(fd: BorrowedFd<'_>, count: usize) -> Vec<(u64, BorrowedFd<'_>)> {
        (0..count).map(|n| (to_u64(n) * 3, fd)).collect()
    }

    /// Runs both ends, and gives the sender's outcome with the receiver's keys.
    fn transfer(
        a: &PacketSocket,
        b: &PacketSocket,
        fds: &[(u64, BorrowedFd<'_>)],
        limit: usize,
    ) -> (Result<()>, Result<Vec<u64>>) {
        std::thread::scope(|scope| {
            let sender = scope.spawn(|| a.send_tagged(fds, patience()));
            let received = b.recv_tagged(limit, patience());
            let keys = received.map(|fds| fds.into_iter().map(|(key, _)| key).collect());
            (sender.join().expect("the sender ran"), keys)
        })
    }

    #[test]
    fn any_number_of_descriptors_arrives_with_its_keys() {
        let (a, b) = pair();
        let (reader, _writer) = pipe();
        for count in [0, 1, 63, 64, 65, 128, 200] {
            let fds = tagged(reader.as_fd(), count);
            let keys = fds.iter().map(|(key, _)| *key).collect();
            assert_eq!(transfer(&a, &b, &fds, count), (Ok(()), Ok(keys)), "{count} descriptors");
        }
    }

    #[test]
    fn each_descriptor_keeps_its_own_key() {
        let (a, b) = pair();
        let pipes: Vec<_> = (0..70).map(|_| pipe()).collect();
        let fds: Vec<_> = pipes.iter().zip(1000..).map(|((_, writer), key)| (key, writer.as_fd())).collect();
        let received = std::thread::scope(|scope| {
            let sender = scope.spawn(|| a.send_tagged(&fds, patience()));
            let received = b.recv_tagged(70, patience());
            sender.join().expect("the sender ran").expect("send");
            received.expect("receive")
        });
        for (key, fd) in received {
            rustix::io::write(fd, &key.to_le_bytes()).expect("write");
        }
        for ((reader, _), key) in pipes.iter().zip(1000_u64..) {
            let mut seen = [0; 8];
            rustix::io::read(reader, &mut seen).expect("read");
            assert_eq!(u64::from_le_bytes(seen), key);
        }
    }

    #[test]
    fn only_one_batch_is_in_flight_until_it_is_answered() {
        let (a, b) = pair();
        let (reader, _writer) = pipe();
        let fds = tagged(reader.as_fd(), 200);
        assert_eq!(a.send_tagged(&fds, Deadline::NOW), Err(Error::TimedOut));
        let (_, first) = b.recv_with_fds(&mut [0; 1024], MAX_FDS, Deadline::NOW).expect("the first batch");
        assert_eq!(first.len(), MAX_FDS);
        assert_eq!(b.recv(&mut [0; 1024], Deadline::NOW), Err(Error::TimedOut));
    }

    #[test]
    fn a_transfer_beyond_the_limit_is_refused_to_both_ends_and_the_connection_lives_on() {
        let (a, b) = pair();
        for (count, limit) in [(1, 0), (2, 1), (65, 64), (200, 199)] {
            let (reader, writer) = pipe();
            let error = Error::TransferTooLarge { count, limit };
            let fds = tagged(writer.as_fd(), count);
            assert_eq!(transfer(&a, &b, &fds, limit), (Err(error.clone()), Err(error)));
            drop(writer);
            assert!(is_closed(&reader), "{count} beyond {limit}");
            let fds = tagged(reader.as_fd(), 1);
            assert_eq!(transfer(&a, &b, &fds, 1), (Ok(()), Ok(vec![0])));
        }
    }

    #[test]
    fn a_receiver_at_its_own_limit_of_open_files_tells_the_sender() {
        let (a, b) = pair();
        let (reader, writer) = pipe();
        let receiver = child::fork(|| {
            let Ok(lowest) = rustix::io::dup(&writer).map(|fd| fd.as_raw_fd()) else {
                return 1;
            };
            let mut limit = getrlimit(Resource::Nofile);
            // A whole batch fits, and a part of the second.
            limit.current = u64::try_from(lowest).ok().map(|lowest| lowest + 70);
            if setrlimit(Resource::Nofile, limit).is_err() {
                return 2;
            }
            let received = b.recv_tagged(500, patience()).map(drop);
            if received == Err(Error::FdsTruncated { room: 64 }) { 0 } else { 3 }
        });
        let fds = tagged(reader.as_fd(), 500);
        assert_eq!(a.send_tagged(&fds, patience()), Err(Error::FdsTruncated { room: 64 }));
        assert_eq!(receiver.wait(), child::Status::Exited(0));
    }

    #[test]
    fn a_hostile_sender_is_told_apart_by_the_rule_it_breaks_and_leaves_nothing_open() {
        let batch = |total, first, count: u64| Batch { total, first, keys: (0..count).collect() };
        for (sent, count, what) in [
            (batch(3, 0, 2), 1, "a batch has another number of descriptors than of keys"),
            (batch(3, 0, 1), 2, "a batch has another number of descriptors than of keys"),
            (batch(3, 1, 1), 1, "a batch does not follow the one before it"),
            (batch(3, 0, 0), 1, "a batch brings nothing"),
            (batch(3, 2, 2), 2, "a batch goes beyond its transfer"),
            (batch(3, u64::MAX, 2), 2, "a batch goes beyond its transfer"),
        ] {
            let (a, b) = pair();
            let (reader, writer) = pipe();
            a.send(&encode_batch(&sent), &vec![writer.as_fd(); count], patience()).expect("send");
            drop(writer);
            let received = b.recv_tagged(MAX_FDS, Deadline::NOW).map(drop);
            assert_eq!(received, Err(Error::Protocol { what }), "{sent:?}");
            assert!(is_closed(&reader), "{sent:?}");
        }
    }

    #[test]
    fn a_transfer_that_changes_its_mind_is_broken_and_what_came_before_is_closed() {
        let (a, b) = pair();
        let (reader, writer) = pipe();
        for total in [2, 3] {
            let batch = Batch { total, first: total - 2, keys: vec![7] };
            a.send(&encode_batch(&batch), &[writer.as_fd()], patience()).expect("send");
        }
        drop(writer);
        let error = Error::Protocol { what: "a batch does not follow the one before it" };
        assert_eq!(b.recv_tagged(10, Deadline::NOW).map(drop), Err(error));
        assert!(is_closed(&reader));
    }

    #[test]
    fn a_sender_that_stops_half_way_times_the_receiver_out_and_what_came_is_closed() {
        let (a, b) = pair();
        let (reader, writer) = pipe();
        let batch = Batch { total: 2, first: 0, keys: vec![7] };
        a.send(&encode_batch(&batch), &[writer.as_fd()], patience()).expect("send");
        drop(writer);
        assert_eq!(b.recv_tagged(10, Deadline::NOW).map(drop), Err(Error::TimedOut));
        assert!(is_closed(&reader));
    }

    #[test]
    fn a_hostile_receiver_is_told_apart_by_the_rule_it_breaks() {
        let answer = |answer| encode_answer(answer).to_vec();
        for (reply, error) in [
            (
                answer(Answer::Taken(2)),
                Error::Protocol { what: "the answer to a batch counts other descriptors than were sent" },
            ),
            (answer(Answer::TooMany(u64::MAX)), Error::TransferTooLarge { count: 1, limit: usize::MAX }),
            (
                encode_batch(&Batch { total: 0, first: 0, keys: vec![] }),
                Error::Protocol {
                    what: "a batch came where an answer was due, or an answer where a batch was",
                },
            ),
            (vec![0; HEADER], Error::Protocol { what: "a packet is not part of a transfer" }),
            (vec![0; 1], Error::Protocol { what: "a packet of a transfer is shorter than its header" }),
            (vec![0; HEADER + 1], Error::PacketTruncated { len: HEADER + 1, room: HEADER }),
        ] {
            let (a, b) = pair();
            b.send(&reply, &[], patience()).expect("send");
            assert_eq!(a.send_tagged(&tagged(a.as_fd(), 1), Deadline::NOW), Err(error));
        }
    }
}
