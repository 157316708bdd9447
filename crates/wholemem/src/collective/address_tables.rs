//! Tables of addresses in device memory: for each rank, the address at which this rank has mapped its part of a window.
//!
//! Kernels read them. All tables of a rank share pages, because the shortest memory of a GPU is 2 MiB.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use wholemem_hal::{Device, Mapping, Rights, Span, Stream, Suballocator};
use wholemem_os::Deadline;

use crate::Result;

/// The alignment of a table in bytes: a cache line, so that no table shares a line with one that is written.
const ALIGN: usize = 128;

/// The pages in which the tables of one rank lie.
#[derive(Debug)]
pub(super) struct AddressTables {
    device: Device,
    pages: Arc<Mutex<Vec<TablePage>>>,
}

#[derive(Debug)]
struct TablePage {
    memory: Mapping,
    free: Suballocator,
}

/// The place of a table. It is free again when this is dropped.
#[derive(Debug)]
struct TableSlot {
    pages: Arc<Mutex<Vec<TablePage>>>,
    page: usize,
    offset: usize,
}

impl Drop for TableSlot {
    fn drop(&mut self) {
        if let Some(page) = lock(&self.pages).get_mut(self.page) {
            // The slot was allocated from this page, and only this drop frees it.
            let _ = page.free.free(self.offset);
        }
    }
}

impl AddressTables {
    pub(super) fn new(device: &Device) -> Self {
        Self { device: device.clone(), pages: Arc::default() }
    }

    /// Allocates an unwritten table of `ranks` addresses. The table is free again when the span and its clones are dropped and their
    /// work has run.
    pub(super) fn allocate(&self, ranks: usize) -> Result<Span> {
        if let Some(table) = self.allocate_existing(ranks) {
            return Ok(table);
        }
        let len = ranks * size_of::<u64>();
        let granule = self.device.granularity()?.minimum;
        let page_len = granule.round_up(len).expect("the table is shorter than the address space");
        let memory = self.device.allocate(page_len)?.map(Rights::ReadWrite)?;
        let mut free = Suballocator::new(page_len);
        let offset = free.allocate(len, ALIGN).expect("an empty page has space for the table");
        let mut pages = lock(&self.pages);
        pages.push(TablePage { memory, free });
        let page = pages.len() - 1;
        Ok(self.table(&pages, page, offset, len))
    }

    /// Allocates a table in a page that exists, without a driver call; `None` if all pages are full.
    fn allocate_existing(&self, ranks: usize) -> Option<Span> {
        let len = ranks * size_of::<u64>();
        let mut pages = lock(&self.pages);
        let existing = pages.iter_mut().enumerate();
        let found =
            existing.filter_map(|(index, page)| Some((index, page.free.allocate(len, ALIGN).ok()?))).next();
        let (page, offset) = found?;
        Some(self.table(&pages, page, offset, len))
    }

    fn table(&self, pages: &[TablePage], page: usize, offset: usize, len: usize) -> Span {
        let span = pages[page].memory.span(offset, len).expect("the suballocator has the length of the page");
        let slot = TableSlot { pages: Arc::clone(&self.pages), page, offset };
        span.with_owner(Arc::new(slot))
    }

    /// Writes addresses to tables, and waits until they are written.
    pub(super) fn write<'a>(&self, tables: impl IntoIterator<Item = (&'a Span, &'a [u64])>) -> Result<()> {
        let stream: Stream = self.device.stream()?;
        for (table, addresses) in tables {
            let bytes: Vec<u8> = addresses.iter().flat_map(|address| address.to_ne_bytes()).collect();
            stream.write(table, &bytes)?;
        }
        Ok(stream.synchronize(Deadline::NEVER)?)
    }
}

fn lock(pages: &Mutex<Vec<TablePage>>) -> MutexGuard<'_, Vec<TablePage>> {
    // Each change under this lock is one push, or one change of a suballocator, so the list is consistent after a panic.
    pages.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use wholemem_hal::{Backend, HostConfig};

    use super::*;

    #[test]
    fn tables_share_pages_and_are_reused_after_their_last_use() {
        let device = Backend::host(HostConfig::default()).unwrap().device(0).unwrap();
        let tables = AddressTables::new(&device);
        let [first, second] = [(); 2].map(|()| tables.allocate(3).unwrap());
        assert_eq!((second.address() - first.address(), first.len()), (ALIGN as u64, 24));
        tables.write([(&first, &[1, 2, 3][..]), (&second, &[4, 5, 6])]).unwrap();
        let read = |span: &Span| {
            let mut bytes = [0; 24];
            device.stream().unwrap().read(span, &mut bytes).unwrap();
            bytes.as_chunks().0.iter().map(|word| u64::from_ne_bytes(*word)).collect::<Vec<_>>()
        };
        assert_eq!((read(&first), read(&second)), (vec![1, 2, 3], vec![4, 5, 6]));
        let (at, clone) = (first.address(), first.part(8, 8).unwrap());
        drop(first);
        assert_ne!(tables.allocate(3).unwrap().address(), at, "a part of the table is still in use");
        drop(clone);
        assert_eq!(tables.allocate(3).unwrap().address(), at);
        let page_len = device.granularity().unwrap().minimum.len();
        let many: Vec<_> = (0..=page_len / ALIGN).map(|_| tables.allocate(3).unwrap()).collect();
        assert_eq!((many.len() > page_len / ALIGN, lock(&tables.pages).len()), (true, 2));
    }
}
