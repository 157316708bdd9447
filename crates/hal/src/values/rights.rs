//! The access rights of devices to mapped memory.

use std::fmt;

use super::DeviceId;

/// The access rights of a device to memory. They are ordered: each value includes the rights of the values before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[doc(alias = "CUmemAccess_flags")]
pub enum Rights {
    /// The device has no access to the memory.
    None,
    /// The device may load from the memory.
    Read,
    /// The device may load from the memory and store to it.
    ReadWrite,
}

impl fmt::Display for Rights {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "no access",
            Self::Read => "read access",
            Self::ReadWrite => "read and write access",
        })
    }
}

/// Access rights that are granted to one device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[doc(alias = "CUmemAccessDesc")]
pub struct Grant {
    /// The device that gets the access rights.
    pub device: DeviceId,
    /// The access rights that are granted to the device.
    pub rights: Rights,
}

/// The access rights of each device to one mapping. Rights only grow while the mapping lives, so existing views stay
/// valid.
#[derive(Debug, Clone, Default)]
pub(crate) struct RightsTable(Vec<Grant>);

impl RightsTable {
    pub(crate) fn of(&self, device: DeviceId) -> Rights {
        self.0.iter().find(|grant| grant.device == device).map_or(Rights::None, |grant| grant.rights)
    }

    /// Returns the highest access rights that any device has to the mapping.
    pub(crate) fn highest(&self) -> Rights {
        self.0.iter().map(|grant| grant.rights).max().unwrap_or(Rights::None)
    }

    /// Returns a copy of this table of access rights with `grants` added. If a device occurs twice, the higher rights
    /// apply.
    pub(crate) fn with(&self, grants: &[Grant]) -> Self {
        let mut table = self.clone();
        for grant in grants {
            match table.0.iter_mut().find(|held| held.device == grant.device) {
                Some(held) => held.rights = held.rights.max(grant.rights),
                None => table.0.push(*grant),
            }
        }
        table
    }

    pub(crate) fn grants(&self) -> &[Grant] {
        &self.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rights_never_shrink() {
        let [zero, one] = [DeviceId(0), DeviceId(1)];
        let table = RightsTable::default().with(&[
            Grant { device: zero, rights: Rights::ReadWrite },
            Grant { device: one, rights: Rights::Read },
        ]);
        let table = table.with(&[
            Grant { device: zero, rights: Rights::Read },
            Grant { device: one, rights: Rights::ReadWrite },
        ]);
        assert_eq!(
            RightsTable::default().with(&[Grant { device: one, rights: Rights::Read }]).highest(),
            Rights::Read
        );
        let uneven = [(zero, Rights::Read), (one, Rights::ReadWrite), (DeviceId(2), Rights::None)];
        let uneven = RightsTable::default().with(&uneven.map(|(device, rights)| Grant { device, rights }));
        assert_eq!(uneven.highest(), Rights::ReadWrite);
        assert_eq!(table.of(zero), Rights::ReadWrite);
        assert_eq!(table.of(one), Rights::ReadWrite);
        assert_eq!(table.of(DeviceId(2)), Rights::None);
        assert_eq!(table.highest(), Rights::ReadWrite);
        assert_eq!(RightsTable::default().highest(), Rights::None);
    }
}
