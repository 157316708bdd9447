//! The names of users, from `/etc/passwd`.

use std::collections::BTreeMap;

/// The names of users by their ids. Users of other sources, such as LDAP, have no name here.
#[derive(Debug, Default)]
pub(super) struct UserNames(BTreeMap<u32, String>);

impl UserNames {
    /// Reads the names of all users of this machine. If the file cannot be read, no user has a name.
    pub(super) fn read() -> Self {
        Self::parse(&std::fs::read_to_string("/etc/passwd").unwrap_or_default())
    }

    fn parse(passwd: &str) -> Self {
        let mut names = BTreeMap::new();
        for line in passwd.lines() {
            let mut fields = line.split(':');
            let (name, user) = (fields.next(), fields.nth(1).and_then(|user| user.parse().ok()));
            if let (Some(name), Some(user)) = (name, user) {
                names.entry(user).or_insert_with(|| name.to_owned());
            }
        }
        Self(names)
    }

    /// Returns the name of a user, or the user's id if the user has no name.
    pub(super) fn of(&self, user: u32) -> String {
        self.0.get(&user).cloned().unwrap_or_else(|| user.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_without_a_name_is_shown_by_id() {
        let names = UserNames::parse(
            "root:x:0:0:root:/root:/bin/sh\n\nbad\ntoor:x:0:0::/:\nann:x:1000:1000:Ann:/:\n",
        );
        assert_eq!([0, 1000, 7].map(|user| names.of(user)), ["root", "ann", "7"]);
    }
}
