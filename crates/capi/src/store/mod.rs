//! The store: a client, its objects, drafts, packs, lists and watches.
//!
//! | module | contents |
//! |---|---|
//! | [`client`] | connections to a store: put, publish, delete, status |
//! | [`entry`] | descriptions of objects, and lists of them |
//! | [`object`] | sealed objects that are held, and read in place |
//! | [`draft`] | objects and packs that are written before they are sealed |
//! | [`watch`] | events of names |
//! | `array` | shape and element type in the metadata of an object |

mod array;
pub mod client;
pub mod draft;
pub mod entry;
pub mod object;
pub mod watch;
