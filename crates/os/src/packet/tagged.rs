//! Transfers of any number of file descriptors, each with a key, in batches that the receiver acknowledges.
//!
//! The kernel counts the descriptors that a user has in flight, and refuses more than the user's limit on open files
//! (`ETOOMANYREFS`). So a batch is sent only after the previous one was received.

use std::os::fd::{BorrowedFd, OwnedFd};

use super::wire::{
    BatchReply, FdBatch, HEADER, KEY, decode_batch, decode_reply, encode_batch, encode_reply, violation,
};
use super::{MAX_FDS, PacketSocket};
use crate::width::{to_u64, to_usize};
use crate::{Deadline, Error, Result};

impl PacketSocket {
    /// Sends any number of file descriptors, each with a key, to a peer that calls
    /// [`recv_tagged`](Self::recv_tagged).
    ///
    /// Returns when the peer has received all of them. If the peer accepts fewer ([`Error::TransferTooLarge`]) or
    /// cannot open all of them ([`Error::FdsTruncated`]), it has closed those it received, and the connection stays
    /// usable. After any other error the two ends may be out of step, and the connection should be closed.
    ///
    /// No other packet may be sent or received on either end during a transfer.
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
        let mut sent = 0;
        // A transfer of no descriptors consists of one empty batch.
        loop {
            let part = &fds[sent..fds.len().min(sent + MAX_FDS)];
            let batch = FdBatch {
                total: to_u64(fds.len()),
                first: to_u64(sent),
                keys: part.iter().map(|(key, _)| *key).collect(),
            };
            let descriptors: Vec<BorrowedFd<'_>> = part.iter().map(|(_, fd)| *fd).collect();
            self.send(&encode_batch(&batch), &descriptors, deadline)?;

            let mut reply = [0; HEADER];
            let len = self.recv(&mut reply, deadline)?;
            sent += part.len();
            match decode_reply(&reply[..len])? {
                BatchReply::Received(count) if count == to_u64(sent) => {}
                BatchReply::Received(_) => {
                    return violation("the reply to a batch has another count of descriptors than were sent");
                }
                BatchReply::TooMany(limit) => {
                    return Err(Error::TransferTooLarge { count: fds.len(), limit: to_usize(limit) });
                }
                BatchReply::Lost(count) => return Err(Error::FdsTruncated { capacity: to_usize(count) }),
            }
            if sent == fds.len() {
                return Ok(());
            }
        }
    }

    /// Receives at most `limit` descriptors that a peer sends with [`send_tagged`](Self::send_tagged).
    ///
    /// On any error all received descriptors are closed. If the transfer exceeds the limit, or the number that this
    /// process may open, the peer gets the same error.
    ///
    /// The keys are chosen by the peer: they may repeat, in any order.
    #[doc(alias = "SCM_RIGHTS")]
    pub fn recv_tagged(&self, limit: usize, deadline: Deadline) -> Result<Vec<(u64, OwnedFd)>> {
        let mut fds: Vec<(u64, OwnedFd)> = Vec::new();
        let mut total = None;
        loop {
            let mut packet = [0; HEADER + MAX_FDS * KEY];
            // The number of accepted descriptors never exceeds what is left of `limit`, so that a peer cannot fill
            // the descriptor table beyond it.
            let max_fds = MAX_FDS.min(limit - fds.len());
            let received = self.receive(&mut packet, max_fds, deadline)?;
            let batch = decode_batch(&packet[..received.len])?;
            if *total.get_or_insert(batch.total) != batch.total || batch.first != to_u64(fds.len()) {
                return violation("a batch does not continue the previous one");
            }
            if batch.total > to_u64(limit) {
                self.send(&encode_reply(BatchReply::TooMany(to_u64(limit))), &[], deadline)?;
                return Err(Error::TransferTooLarge { count: to_usize(batch.total), limit });
            }
            if received.lost {
                self.send(&encode_reply(BatchReply::Lost(to_u64(batch.keys.len()))), &[], deadline)?;
                return Err(Error::FdsTruncated { capacity: batch.keys.len() });
            }
            if received.fds.len() != batch.keys.len() {
                return violation("a batch has different numbers of descriptors and keys");
            }
            fds.extend(batch.keys.into_iter().zip(received.fds));
            self.send(&encode_reply(BatchReply::Received(to_u64(fds.len()))), &[], deadline)?;
            if to_u64(fds.len()) == batch.total {
                return Ok(fds);
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

    fn test_deadline() -> Deadline {
        Deadline::after(Duration::from_secs(60))
    }

    fn pair() -> (PacketSocket, PacketSocket) {
        PacketSocket::pair().expect("two sockets")
    }

    fn pipe() -> (OwnedFd, OwnedFd) {
        pipe_with(PipeFlags::CLOEXEC).expect("a pipe")
    }

    /// Returns whether the writing end of a pipe is closed. The function waits for that, since a child that another
    /// test forks may briefly hold a copy.
    fn is_closed(reader: &OwnedFd) -> bool {
        let mut watched = [PollFd::new(reader, PollFlags::IN)];
        let timeout = test_deadline().timeout();
        poll(&mut watched, timeout.as_ref()).expect("poll") == 1
            && watched[0].revents().contains(PollFlags::HUP)
    }

    fn tagged(fd: BorrowedFd<'_>, count: usize) -> Vec<(u64, BorrowedFd<'_>)> {
        (0..count).map(|n| (to_u64(n) * 3, fd)).collect()
    }

    /// Runs both ends of a descriptor transfer, and returns the outcome of the sender and the keys that the receiver
    /// got.
    fn transfer(
        a: &PacketSocket,
        b: &PacketSocket,
        fds: &[(u64, BorrowedFd<'_>)],
        limit: usize,
    ) -> (Result<()>, Result<Vec<u64>>) {
        std::thread::scope(|scope| {
            let sender = scope.spawn(|| a.send_tagged(fds, test_deadline()));
            let received = b.recv_tagged(limit, test_deadline());
            let keys = received.map(|fds| fds.into_iter().map(|(key, _)| key).collect());
            (sender.join().expect("no panic"), keys)
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
    fn each_descriptor_arrives_with_its_own_key() {
        let (a, b) = pair();
        let pipes: Vec<_> = (0..70).map(|_| pipe()).collect();
        let fds: Vec<_> = pipes.iter().zip(1000..).map(|((_, writer), key)| (key, writer.as_fd())).collect();
        let received = std::thread::scope(|scope| {
            let sender = scope.spawn(|| a.send_tagged(&fds, test_deadline()));
            let received = b.recv_tagged(70, test_deadline());
            sender.join().expect("no panic").expect("send");
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
    fn the_next_batch_is_sent_after_the_previous_one_is_acknowledged() {
        let (a, b) = pair();
        let (reader, _writer) = pipe();
        let fds = tagged(reader.as_fd(), 200);
        assert_eq!(a.send_tagged(&fds, Deadline::NOW), Err(Error::TimedOut));
        let (_, first) = b.recv_with_fds(&mut [0; 1024], MAX_FDS, Deadline::NOW).expect("the first batch");
        assert_eq!(first.len(), MAX_FDS);
        assert_eq!(b.recv(&mut [0; 1024], Deadline::NOW), Err(Error::TimedOut));
    }

    #[test]
    fn a_transfer_above_the_limit_fails_on_both_ends_and_the_connection_stays_usable() {
        let (a, b) = pair();
        for (count, limit) in [(1, 0), (2, 1), (65, 64), (200, 199)] {
            let (reader, writer) = pipe();
            let error = Error::TransferTooLarge { count, limit };
            let fds = tagged(writer.as_fd(), count);
            assert_eq!(transfer(&a, &b, &fds, limit), (Err(error.clone()), Err(error)));
            drop(writer);
            assert!(is_closed(&reader), "{count} sent, the limit is {limit}");
            let fds = tagged(reader.as_fd(), 1);
            assert_eq!(transfer(&a, &b, &fds, 1), (Ok(()), Ok(vec![0])));
        }
    }

    #[test]
    fn the_sender_gets_an_error_if_the_receiver_reaches_its_descriptor_limit() {
        let (a, b) = pair();
        let (reader, writer) = pipe();
        let receiver = child::fork(|| {
            let Ok(lowest) = rustix::io::dup(&writer).map(|fd| fd.as_raw_fd()) else {
                return 1;
            };
            let mut limit = getrlimit(Resource::Nofile);
            // With this limit on open files, the receiver can open the first batch of 64 descriptors, and a part of
            // the second.
            limit.current = u64::try_from(lowest).ok().map(|lowest| lowest + 70);
            if setrlimit(Resource::Nofile, limit).is_err() {
                return 2;
            }
            let received = b.recv_tagged(500, test_deadline()).map(drop);
            if received == Err(Error::FdsTruncated { capacity: 64 }) { 0 } else { 3 }
        });
        let fds = tagged(reader.as_fd(), 500);
        assert_eq!(a.send_tagged(&fds, test_deadline()), Err(Error::FdsTruncated { capacity: 64 }));
        assert_eq!(receiver.wait(), child::ExitStatus::Exited(0));
    }

    #[test]
    fn an_invalid_batch_is_a_protocol_error_and_its_descriptors_are_closed() {
        let batch = |total, first, count: u64| FdBatch { total, first, keys: (0..count).collect() };
        for (sent, count, violation) in [
            (batch(3, 0, 2), 1, "a batch has different numbers of descriptors and keys"),
            (batch(3, 0, 1), 2, "a batch has different numbers of descriptors and keys"),
            (batch(3, 1, 1), 1, "a batch does not continue the previous one"),
            (batch(3, 0, 0), 1, "a batch is empty"),
            (batch(3, 2, 2), 2, "a batch exceeds the total of its transfer"),
            (batch(3, u64::MAX, 2), 2, "a batch exceeds the total of its transfer"),
        ] {
            let (a, b) = pair();
            let (reader, writer) = pipe();
            a.send(&encode_batch(&sent), &vec![writer.as_fd(); count], test_deadline()).expect("send");
            drop(writer);
            let received = b.recv_tagged(MAX_FDS, Deadline::NOW).map(drop);
            assert_eq!(received, Err(Error::Protocol { violation }), "{sent:?}");
            assert!(is_closed(&reader), "{sent:?}");
        }
    }

    #[test]
    fn a_transfer_that_changes_its_total_is_a_protocol_error_and_its_descriptors_are_closed() {
        let (a, b) = pair();
        let (reader, writer) = pipe();
        for total in [2, 3] {
            let batch = FdBatch { total, first: total - 2, keys: vec![7] };
            a.send(&encode_batch(&batch), &[writer.as_fd()], test_deadline()).expect("send");
        }
        drop(writer);
        let error = Error::Protocol { violation: "a batch does not continue the previous one" };
        assert_eq!(b.recv_tagged(10, Deadline::NOW).map(drop), Err(error));
        assert!(is_closed(&reader));
    }

    #[test]
    fn the_receiver_times_out_if_the_sender_stops_and_received_descriptors_are_closed() {
        let (a, b) = pair();
        let (reader, writer) = pipe();
        let batch = FdBatch { total: 2, first: 0, keys: vec![7] };
        a.send(&encode_batch(&batch), &[writer.as_fd()], test_deadline()).expect("send");
        drop(writer);
        assert_eq!(b.recv_tagged(10, Deadline::NOW).map(drop), Err(Error::TimedOut));
        assert!(is_closed(&reader));
    }

    #[test]
    fn an_invalid_reply_is_an_error() {
        let reply = |reply| encode_reply(reply).to_vec();
        for (bytes, error) in [
            (
                reply(BatchReply::Received(2)),
                Error::Protocol {
                    violation: "the reply to a batch has another count of descriptors than were sent",
                },
            ),
            (reply(BatchReply::TooMany(u64::MAX)), Error::TransferTooLarge { count: 1, limit: usize::MAX }),
            (
                encode_batch(&FdBatch { total: 0, first: 0, keys: vec![] }),
                Error::Protocol {
                    violation: "received a batch instead of a reply, or a reply instead of a batch",
                },
            ),
            (vec![0; HEADER], Error::Protocol { violation: "a packet is not part of a transfer" }),
            (vec![0; 1], Error::Protocol { violation: "a packet of a transfer is shorter than its header" }),
            (vec![0; HEADER + 1], Error::PacketTruncated { len: HEADER + 1, capacity: HEADER }),
        ] {
            let (a, b) = pair();
            b.send(&bytes, &[], test_deadline()).expect("send");
            assert_eq!(a.send_tagged(&tagged(a.as_fd(), 1), Deadline::NOW), Err(error));
        }
    }
}
