//! The properties of objects as `ls`, `stat`, `rm` and their JSON show them.

use std::collections::BTreeMap;
use std::time::{Duration, SystemTime};

use anyhow::Result;
use serde::Serialize;
use wholemem::Dtype;
use wholemem::files::npy::NpyHeader;
use wholemem_store::{Client, Entry, ObjectId};

use super::tensors;
use super::users::UserNames;

/// The properties of an object of a store.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct ObjectSummary {
    pub(crate) name: String,
    pub(crate) id: u64,
    pub(crate) len: usize,
    pub(crate) version: u64,
    pub(crate) owner: u32,
    pub(crate) owner_name: String,
    pub(crate) created_ms: u64,
    pub(crate) place: &'static str,
    /// The number of clients that hold the object.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) readers: Option<u32>,
    /// The element type of a tensor, such as `f32`.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub(crate) type_name: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) shape: Option<Vec<u64>>,
    /// For a pack, the number of objects that it contains.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) objects: Option<usize>,
    /// The id of the pack that contains the object.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) pack: Option<u64>,
    #[serde(skip_serializing_if = "String::is_empty")]
    pub(crate) description: String,
}

/// Creates summaries of the objects of a store.
pub(crate) struct Summarizer<'a> {
    client: &'a Client,
    users: UserNames,
    /// The number of objects of each pack, by its first object, which does not count.
    packs: BTreeMap<ObjectId, usize>,
}

impl<'a> Summarizer<'a> {
    pub(crate) fn new(client: &'a Client) -> Result<Self> {
        let mut packs = BTreeMap::new();
        let all = client.list("")?.into_iter().chain(client.drafts("")?);
        for entry in all.filter(|entry| entry.pack.is_some_and(|first| first != entry.id)) {
            *packs.entry(entry.pack.unwrap_or(entry.id)).or_insert(0) += 1;
        }
        Ok(Self { client, users: UserNames::read(), packs })
    }

    /// Returns the summaries of objects, without their readers.
    pub(crate) fn summarize(&self, entries: &[Entry]) -> Vec<ObjectSummary> {
        entries.iter().map(|entry| self.summary(entry)).collect()
    }

    /// Returns the summaries of objects with their readers, which the server counts.
    pub(crate) fn with_readers(&self, entries: &[Entry]) -> Result<Vec<ObjectSummary>> {
        let ids: Vec<_> = entries.iter().map(|entry| entry.id).collect();
        let readers = self.client.readers(&ids)?;
        let mut all = self.summarize(entries);
        for (summary, readers) in all.iter_mut().zip(readers) {
            summary.readers = Some(readers);
        }
        Ok(all)
    }

    fn summary(&self, entry: &Entry) -> ObjectSummary {
        let (type_name, shape) =
            tensor(&entry.meta).map_or((None, None), |(name, shape)| (Some(name), shape));
        ObjectSummary {
            name: entry.name.clone(),
            id: entry.id.as_u64(),
            len: entry.len,
            version: entry.version,
            owner: entry.owner,
            owner_name: self.users.of(entry.owner),
            created_ms: entry.created,
            place: if entry.is_cpu { "host" } else { "device" },
            readers: None,
            type_name,
            shape,
            objects: entry
                .pack
                .filter(|first| *first == entry.id)
                .map(|id| *self.packs.get(&id).unwrap_or(&0)),
            pack: entry.pack.filter(|first| *first != entry.id).map(ObjectId::as_u64),
            description: String::from_utf8_lossy(&entry.meta).into_owned(),
        }
    }
}

/// Returns the element type and the shape in the description of an object that is a tensor. A structured type of numpy has no
/// shape here.
fn tensor(meta: &[u8]) -> Option<(String, Option<Vec<u64>>)> {
    if let Some(header) = tensors::npy_header(meta) {
        let NpyHeader { descr, shape, .. } = header;
        let known = Dtype::ALL.iter().find(|dtype| dtype.info().npy == Some(descr.as_str()));
        let is_structure = descr == "structure";
        return Some((known.map_or(descr, ToString::to_string), (!is_structure).then_some(shape)));
    }
    let tensor = tensors::parse_description("", meta, 0).ok()?;
    let known = Dtype::from_safetensors(&tensor.type_name).map(|dtype| dtype.to_string());
    Some((known.unwrap_or_else(|| tensor.type_name.to_lowercase()), Some(tensor.shape)))
}

impl ObjectSummary {
    /// Returns what the object contains: the type and the shape of a tensor, or the number of objects of a pack.
    pub(crate) fn content(&self) -> String {
        if let Some(objects) = self.objects {
            return count(objects, "object");
        }
        let shape = self.shape.as_ref().map(|shape| {
            let lens: Vec<_> = shape.iter().map(u64::to_string).collect();
            format!("[{}]", lens.join(","))
        });
        self.type_name
            .as_ref()
            .map_or_else(|| "bytes".to_owned(), |name| format!("{name}{}", shape.unwrap_or_default()))
    }

    /// Returns the time since the object was created, in the largest whole unit.
    pub(crate) fn age(&self) -> String {
        let created = SystemTime::UNIX_EPOCH + Duration::from_millis(self.created_ms);
        // A clock that was set back shows an age of zero.
        rounded_time(created.elapsed().unwrap_or_default())
    }
}

/// Formats a number of things: `1 object`, `2 objects`.
pub(crate) fn count(count: usize, what: &str) -> String {
    format!("{count} {what}{}", if count == 1 { "" } else { "s" })
}

/// Formats a time in its largest unit that is not zero: `5 s`, `3 min`, `2 h`, `4 d`.
pub(crate) fn rounded_time(time: Duration) -> String {
    let seconds = time.as_secs();
    let units = [(86_400, "d"), (3600, "h"), (60, "min"), (1, "s")];
    let (len, unit) = units.into_iter().find(|(len, _)| seconds >= *len).unwrap_or((1, "s"));
    format!("{} {unit}", seconds / len)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_description_is_shown_as_type_and_shape() {
        let of = |meta: &str| tensor(meta.as_bytes());
        assert_eq!(of(r#"{"dtype":"F32","shape":[2,3]}"#), Some(("f32".to_owned(), Some(vec![2, 3]))));
        assert_eq!(of(r#"{"dtype":"F6_E2M3","shape":[]}"#), Some(("f6_e2m3".to_owned(), Some(vec![]))));
        let npy = "npy {'descr': '<f4', 'fortran_order': False, 'shape': (2, 3), }";
        assert_eq!(of(npy), Some(("f32".to_owned(), Some(vec![2, 3]))));
        let structure = "npy {'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (2,), }";
        assert_eq!(of(structure), Some(("structure".to_owned(), None)));
        assert_eq!((of(""), of("safetensors"), of("npy {")), (None, None, None));
    }

    #[test]
    fn times_are_shown_in_their_largest_unit() {
        for (seconds, text) in
            [(0, "0 s"), (59, "59 s"), (60, "1 min"), (3599, "59 min"), (7200, "2 h"), (200_000, "2 d")]
        {
            assert_eq!(rounded_time(Duration::from_secs(seconds)), text);
        }
    }
}
