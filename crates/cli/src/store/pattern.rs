//! Selects objects by name: names, prefixes, and patterns with `*`, `?` and `[...]`.

use std::collections::BTreeSet;

use anyhow::{Result, anyhow};
use glob::Pattern;
use wholemem_os::Visible;
use wholemem_store::{Client, Entry, Refusal};

use super::natural;

/// Returns the pattern that a text is; `None` for a text that can only be a name.
fn pattern(text: &str) -> Option<Pattern> {
    Pattern::new(text).ok().filter(|_| text.contains(['*', '?', '[']))
}

/// Returns the objects whose names begin with a prefix or match a pattern (`*` matches `/` too), in natural order.
pub(super) fn listed(client: &Client, selection: &str) -> Result<Vec<Entry>> {
    let Some(pattern) = pattern(selection) else { return Ok(sorted(client.list(selection)?)) };
    let mut entries = client.list("")?;
    // An object may have a name that looks like a pattern.
    entries.retain(|entry| pattern.matches(&entry.name) || entry.name.starts_with(selection));
    Ok(sorted(entries))
}

/// Returns the object of a name, or all objects whose names match a pattern. At least one is returned.
pub(super) fn selected(client: &Client, selection: &str) -> Result<Vec<Entry>> {
    let missing = match client.stat(selection) {
        Ok(entry) => return Ok(vec![entry]),
        Err(wholemem_store::Error::Refused(missing @ Refusal::NoSuchName { .. })) => missing,
        Err(error) => return Err(error.into()),
    };
    let Some(pattern) = pattern(selection) else {
        return Err(wholemem_store::Error::Refused(missing).into());
    };
    let mut entries = client.list("")?;
    entries.retain(|entry| pattern.matches(&entry.name));
    match entries.is_empty() {
        true => Err(anyhow!("no object has a name that matches `{}`", Visible(selection))),
        false => Ok(sorted(entries)),
    }
}

/// Sorts objects by name, in natural order.
pub(crate) fn sorted(mut entries: Vec<Entry>) -> Vec<Entry> {
    entries.sort_by(|a, b| natural::compare(&a.name, &b.name).then(a.id.cmp(&b.id)));
    entries
}

/// Removes the objects of packs that are listed themselves.
pub(crate) fn fold_packs(entries: &mut Vec<Entry>) {
    let listed: BTreeSet<_> = entries.iter().map(|entry| entry.id).collect();
    entries.retain(|entry| entry.pack.is_none_or(|first| first == entry.id || !listed.contains(&first)));
}
