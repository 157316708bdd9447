//! Limits the memory and the file descriptors that the store server and its keeper process hold for clients.
//!
//! Every buffer, queue entry, pin page and descriptor that exists because of a client is charged to the client's account before
//! it is allocated, and released when its [`Charge`] is dropped. There is no other counter. Memory of objects is not charged
//! here; it counts against the quota.
//!
//! ```text
//!   pool of the server's own user        pool of all other users
//!     user 1000                            user 1001            user 1002
//!       connection  connection               connection           connection  connection
//! ```
//!
//! A charge must fit three limits: of the connection, of the user and of the pool. The server's own user may use all of its pool.
//! In the shared pool a user may hold at most as much as is free: one user gets at most half of the pool, two users a third each,
//! `n` users an `n+1`th each. So there is always some space for another user, and the number of users need not be known in
//! advance.
//!
//! Connections alone may not use all of a user's limit: the length of the longest message is reserved for requests, so that a
//! user with the maximum number of connections can still send a long message.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::rc::{Rc, Weak};

use crate::protocol::Refusal;
use crate::protocol::frame::MAX_MESSAGE;

/// An amount of memory in bytes, and a number of file descriptors.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Amount {
    pub(crate) bytes: u64,
    pub(crate) descriptors: u64,
}

impl Amount {
    pub(crate) const fn bytes(bytes: u64) -> Self {
        Self { bytes, descriptors: 0 }
    }

    fn plus(self, other: Self) -> Self {
        Self {
            bytes: self.bytes.saturating_add(other.bytes),
            descriptors: self.descriptors.saturating_add(other.descriptors),
        }
    }

    fn minus(self, other: Self) -> Self {
        Self { bytes: self.bytes - other.bytes, descriptors: self.descriptors - other.descriptors }
    }

    fn fits(self, limit: Self) -> bool {
        self.bytes <= limit.bytes && self.descriptors <= limit.descriptors
    }
}

/// The cost of a client's connection before the client sends its hello message: the connection's state in the server and in the
/// keeper process, and the kernel's socket with queued answers.
pub(crate) const CONNECTION: Amount = Amount { bytes: 4 << 10, descriptors: 1 };

/// The limit on the charges of one connection: twice the maximum length of a message, which is enough for one such message, the
/// pin page and many short messages.
const MAX_PER_CONNECTION: Amount = Amount { bytes: 2 * MAX_MESSAGE as u64, descriptors: 128 };

/// The limits on the memory and the descriptors that a store server holds for its clients.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BudgetLimits {
    /// The limit on the memory and descriptors that all clients of the server's own user may hold together.
    pub(crate) own: Amount,
    /// The limit on the memory and descriptors that all clients of other users may hold together.
    pub(crate) others: Amount,
}

impl BudgetLimits {
    /// Returns the limits for a server with this quota of host memory and this maximum number of file descriptors.
    ///
    /// Clients of the server's own user are trusted and may use a sixteenth of the quota. Clients of all other users share 96
    /// MiB, of which one user gets at most 48 MiB.
    pub(crate) fn of_server(quota: u64, descriptors: u64) -> Self {
        let own = (quota / 16).clamp(64 << 20, 1 << 30);
        Self {
            own: Amount { bytes: own, descriptors: descriptors / 2 },
            others: Amount { bytes: 96 << 20, descriptors: descriptors / 4 },
        }
    }
}

#[derive(Debug)]
struct BudgetPool {
    limit: Amount,
    held: Cell<Amount>,
    /// True if several users share this pool of memory and descriptors.
    is_shared: bool,
}

#[derive(Debug)]
struct BudgetUser {
    uid: u32,
    pool: Rc<BudgetPool>,
    held: Cell<Amount>,
}

impl BudgetUser {
    /// Returns how much a user may hold when a connection is charged. It is less than the user's full limit, which leaves memory
    /// for a long message.
    fn limit_with_connection(&self) -> Amount {
        let Amount { bytes, descriptors } = self.limit();
        Amount { bytes: bytes - (bytes / 2).min(MAX_MESSAGE as u64), descriptors }
    }

    /// Returns the current limit on the memory and the descriptors that the clients of this user may hold.
    fn limit(&self) -> Amount {
        let BudgetPool { limit, held, is_shared } = &*self.pool;
        if !is_shared {
            return *limit;
        }
        // A user may hold at most as much as remains free, `held <= limit - others - held`, which is equivalent to `held <=
        // (limit - others) / 2`.
        let share = |limit: u64, all: u64, own: u64| limit.saturating_sub(all - own) / 2;
        let (all, own) = (held.get(), self.held.get());
        Amount {
            bytes: share(limit.bytes, all.bytes, own.bytes),
            descriptors: share(limit.descriptors, all.descriptors, own.descriptors),
        }
    }
}

#[derive(Debug)]
struct ConnectionAccount {
    user: Rc<BudgetUser>,
    held: Cell<Amount>,
}

/// The accounts to which the memory and descriptors of all clients of a server are charged.
#[derive(Debug)]
pub(crate) struct Budget {
    own_uid: u32,
    own: Rc<BudgetPool>,
    others: Rc<BudgetPool>,
    users: BTreeMap<u32, Weak<BudgetUser>>,
}

/// The account to which the memory and descriptors of one connection are charged. Clones refer to the same account.
#[derive(Debug, Clone)]
pub(crate) struct Account(Rc<ConnectionAccount>);

/// Memory and descriptors that are charged to a connection's account until the `Charge` is dropped.
#[derive(Debug)]
pub(crate) struct Charge {
    connection: Rc<ConnectionAccount>,
    amount: Amount,
}

impl Budget {
    pub(crate) fn new(own_uid: u32, limits: BudgetLimits) -> Self {
        let pool = |limit, is_shared| Rc::new(BudgetPool { limit, held: Cell::default(), is_shared });
        Self {
            own_uid,
            own: pool(limits.own, false),
            others: pool(limits.others, true),
            users: BTreeMap::new(),
        }
    }

    /// Opens an account for a new connection of a user.
    pub(crate) fn open(&mut self, uid: u32) -> Account {
        let existing = self.users.get(&uid).and_then(Weak::upgrade);
        let user = existing.unwrap_or_else(|| {
            self.users.retain(|_, user| user.strong_count() > 0);
            let pool = Rc::clone(if uid == self.own_uid { &self.own } else { &self.others });
            let user = Rc::new(BudgetUser { uid, pool, held: Cell::default() });
            self.users.insert(uid, Rc::downgrade(&user));
            user
        });
        Account(Rc::new(ConnectionAccount { user, held: Cell::default() }))
    }

    /// Returns the total memory and descriptors that are charged to all clients.
    pub(crate) fn held(&self) -> Amount {
        self.own.held.get().plus(self.others.held.get())
    }
}

impl Account {
    pub(crate) fn uid(&self) -> u32 {
        self.0.user.uid
    }

    /// Charges an amount to the account of a connection, or returns a refusal with the limit that would be exceeded.
    pub(crate) fn charge(&self, amount: Amount) -> Result<Charge, Refusal> {
        let mut charge = self.nothing();
        charge.grow(amount)?;
        Ok(charge)
    }

    /// Charges the cost of a connection itself, for which a user's limit is lower than for requests.
    pub(crate) fn charge_connection(&self, amount: Amount) -> Result<Charge, Refusal> {
        let mut charge = self.nothing();
        charge.grow_within(self.0.user.limit_with_connection(), amount)?;
        Ok(charge)
    }

    /// Charges an amount without checking the limits, for a client that the previous server has admitted.
    pub(crate) fn charge_held(&self, amount: Amount) -> Charge {
        let mut charge = self.nothing();
        charge.add(amount);
        charge
    }

    fn nothing(&self) -> Charge {
        Charge { connection: Rc::clone(&self.0), amount: Amount::default() }
    }
}

impl Charge {
    /// Increases a charge by an amount, or returns a refusal with the limit that would be exceeded.
    pub(crate) fn grow(&mut self, more: Amount) -> Result<(), Refusal> {
        let limit = self.connection.user.limit();
        self.grow_within(limit, more)
    }

    fn grow_within(&mut self, of_user: Amount, more: Amount) -> Result<(), Refusal> {
        let user = &self.connection.user;
        let limits = [
            (&self.connection.held, MAX_PER_CONNECTION),
            (&user.held, of_user),
            (&user.pool.held, user.pool.limit),
        ];
        for (held, limit) in limits {
            let (held, wanted) = (held.get(), held.get().plus(more));
            if !wanted.fits(limit) {
                let is_bytes = wanted.bytes > limit.bytes;
                let pick = |amount: Amount| if is_bytes { amount.bytes } else { amount.descriptors };
                return Err(Refusal::ClientLimit {
                    user: user.uid,
                    what: if is_bytes { "bytes" } else { "descriptors" }.to_owned(),
                    wanted: pick(more),
                    held: pick(held),
                    limit: pick(limit),
                });
            }
        }
        self.add(more);
        Ok(())
    }

    fn add(&mut self, more: Amount) {
        for held in self.counters() {
            held.set(held.get().plus(more));
        }
        self.amount = self.amount.plus(more);
    }

    /// Adds the amount of another charge of the same account to this charge.
    pub(crate) fn absorb(&mut self, mut other: Self) {
        debug_assert!(
            Rc::ptr_eq(&self.connection, &other.connection),
            "both charges must be of the same account"
        );
        self.amount = self.amount.plus(std::mem::take(&mut other.amount));
    }

    /// Reduces a charge to at most this amount, and releases the difference.
    pub(crate) fn shrink_to(&mut self, amount: Amount) {
        let remaining = Amount {
            bytes: self.amount.bytes.min(amount.bytes),
            descriptors: self.amount.descriptors.min(amount.descriptors),
        };
        let released = self.amount.minus(remaining);
        for held in self.counters() {
            held.set(held.get().minus(released));
        }
        self.amount = remaining;
    }

    fn counters(&self) -> [&Cell<Amount>; 3] {
        let user = &self.connection.user;
        [&self.connection.held, &user.held, &user.pool.held]
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        self.shrink_to(Amount::default());
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns a budget with limits that no test reaches.
    pub(crate) fn unlimited() -> Budget {
        Budget::new(0, BudgetLimits::of_server(u64::MAX, u64::MAX))
    }

    fn small() -> Budget {
        let limit = |bytes| Amount { bytes, descriptors: 1000 };
        Budget::new(0, BudgetLimits { own: limit(1000), others: limit(900) })
    }

    fn bytes(account: &Account, bytes: u64) -> Result<Charge, Refusal> {
        account.charge(Amount::bytes(bytes))
    }

    #[test]
    fn a_charge_is_released_when_it_is_dropped_or_shrunk() {
        let mut budget = small();
        let account = budget.open(7);
        let mut charge = account.charge(Amount { bytes: 100, descriptors: 2 }).unwrap();
        charge.grow(Amount::bytes(50)).unwrap();
        assert_eq!(budget.held(), Amount { bytes: 150, descriptors: 2 });
        charge.shrink_to(Amount::bytes(30));
        assert_eq!(budget.held(), Amount::bytes(30));
        charge.absorb(account.charge(Amount::bytes(5)).unwrap());
        assert_eq!((budget.held(), charge.amount), (Amount::bytes(35), Amount::bytes(35)));
        drop(charge);
        assert_eq!(budget.held(), Amount::default());
    }

    #[test]
    fn one_user_gets_half_of_the_shared_pool_and_two_a_third_each() {
        let mut budget = small();
        let (first, second) = (budget.open(7), budget.open(8));
        let mut held = vec![bytes(&first, 450).unwrap()];
        let refused =
            Refusal::ClientLimit { user: 7, what: "bytes".to_owned(), wanted: 1, held: 450, limit: 450 };
        assert_eq!(bytes(&first, 1).unwrap_err(), refused);
        held.clear();
        for _ in 0..500 {
            held.extend([&first, &second].into_iter().filter_map(|account| bytes(account, 1).ok()));
        }
        let share = |account: &Account| account.0.user.held.get().bytes;
        assert_eq!((share(&first), share(&second)), (300, 300));
    }

    #[test]
    fn the_own_user_has_a_pool_that_others_cannot_use() {
        let mut budget = small();
        let (own, other) = (budget.open(0), budget.open(7));
        let _all = bytes(&other, 450).unwrap();
        let _own = bytes(&own, 1000).unwrap();
        assert!(bytes(&own, 1).is_err());
    }

    #[test]
    fn a_users_amount_is_the_sum_of_its_connections() {
        let mut budget = small();
        let (first, second) = (budget.open(7), budget.open(7));
        let _held = bytes(&first, 450).unwrap();
        assert!(bytes(&second, 1).is_err());
    }

    #[test]
    fn connections_leave_space_for_a_message() {
        for uid in [0, 7] {
            let mut budget = Budget::new(0, BudgetLimits::of_server(1 << 30, 1 << 20));
            let mut connections = Vec::new();
            let refused = loop {
                let account = budget.open(uid);
                match account.charge_connection(Amount::bytes(100 << 10)) {
                    Ok(charge) => connections.push((account, charge)),
                    Err(refused) => break refused,
                }
            };
            assert!(matches!(refused, Refusal::ClientLimit { .. }), "{refused:?}");
            assert!(connections.len() > 300, "{} connections", connections.len());
            let account = &connections.last().unwrap().0;
            assert!(bytes(account, MAX_MESSAGE as u64).is_ok());
        }
    }

    #[test]
    fn descriptors_are_limited_like_bytes() {
        let mut budget = Budget::new(
            0,
            BudgetLimits {
                own: Amount { bytes: 100, descriptors: 3 },
                others: Amount { bytes: 100, descriptors: 8 },
            },
        );
        let other = budget.open(7);
        let held = other.charge(Amount { bytes: 0, descriptors: 4 }).unwrap();
        let refused =
            Refusal::ClientLimit { user: 7, what: "descriptors".to_owned(), wanted: 1, held: 4, limit: 4 };
        assert_eq!(other.charge(Amount { bytes: 0, descriptors: 1 }).unwrap_err(), refused);
        drop(held);
        assert!(other.charge(Amount { bytes: 0, descriptors: 1 }).is_ok());
    }

    #[test]
    fn users_without_connections_are_removed() {
        let mut budget = small();
        for uid in 1..100 {
            drop(bytes(&budget.open(uid), 10).unwrap());
        }
        assert!(budget.users.len() <= 2, "{:?}", budget.users);
    }

    proptest! {
        /// Checks that a user who holds no memory can always charge some, however much the other users have charged.
        #[test]
        fn another_user_always_finds_space(requests in prop::collection::vec((1_u32..6, 1_u64..400), 0..60)) {
            let mut budget = small();
            let mut held = Vec::new();
            for (uid, amount) in requests {
                let account = budget.open(uid);
                let fits = bytes(&account, amount);
                held.extend(fits);
                let all = budget.others.held.get().bytes;
                prop_assert!(all < 900);
            }
            let late = budget.open(99);
            prop_assert!(bytes(&late, 1).is_ok());
            let sum: u64 = held.iter().map(|charge| charge.amount.bytes).sum();
            prop_assert_eq!(budget.others.held.get().bytes, sum);
        }
    }
}
