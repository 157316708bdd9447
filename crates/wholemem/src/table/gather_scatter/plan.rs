//! Checks the operands of a gather or scatter and plans the request to a kernel. Pure.

use super::Op;
use crate::abi::{ElementsRequest, GlobalRef, IndexType, RowsRequest};
use crate::{Dtype, Error, ReduceOp, Result};
use wholemem_os::width::to_usize;

/// The table's side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Table {
    pub(crate) global: GlobalRef,
    pub(crate) dtype: Dtype,
    /// Elements of a row.
    pub(crate) elements: u64,
}

impl Table {
    /// Checks that its elements are aligned: a view of raw memory may have rows of any length.
    fn check_aligned(&self) -> Result<()> {
        let GlobalRef { base, offset, stride, chunks, .. } = self.global;
        // Chunks begin on granules.
        let first = if chunks == 1 { base } else { offset };
        check_aligned("rows of the table", first, to_usize(stride), self.dtype.len())
    }
}

/// Where indices are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct IndexPlace {
    pub(crate) address: u64,
    pub(crate) len: usize,
    pub(crate) kind: IndexType,
}

/// Where the dense side is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct DensePlace {
    pub(crate) address: u64,
    pub(crate) len: usize,
    pub(crate) dtype: Dtype,
    pub(crate) stride: Option<usize>,
    pub(crate) convert: bool,
}

/// What a kernel is to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Request {
    /// Move rows as they are.
    Rows(RowsRequest),
    /// Move rows element by element.
    Elements(ElementsRequest),
}

impl Request {
    /// What is the same in both.
    pub(crate) fn rows(&self) -> &RowsRequest {
        match self {
            Self::Rows(rows) => rows,
            Self::Elements(request) => &request.rows,
        }
    }
}

/// What to ask of a kernel; `None` if there is nothing to do.
pub(crate) fn plan(
    op: Op,
    table: &Table,
    indices: &IndexPlace,
    dense: &DensePlace,
    bad: u64,
) -> Result<Option<Request>> {
    let index_len = indices.kind.len();
    check_aligned("indices", indices.address, indices.len, index_len)?;
    if op == Op::ScatterAdd && !table.dtype.is_number() {
        return Err(Error::OpNotForType { op: ReduceOp::Sum, dtype: table.dtype });
    }
    // Elements are copied as they are stored, so rows may also have the type of the storage.
    let converts = dense.dtype != table.dtype && dense.dtype != table.dtype.storage();
    if converts && !dense.convert {
        return Err(Error::TypesDiffer { table: table.dtype, rows: dense.dtype });
    }
    if converts && !dense.dtype.converts_to(table.dtype) {
        let (from, to) =
            if op == Op::Gather { (table.dtype, dense.dtype) } else { (dense.dtype, table.dtype) };
        return Err(Error::NotConvertible { from, to });
    }
    let count = (indices.len / index_len) as u64;
    let dense_len = row_len(table.elements, dense.dtype)?;
    let stride = dense.stride.unwrap_or(dense_len);
    if stride < dense_len {
        return Err(Error::StrideTooShort { row_len: dense_len, stride });
    }
    let by_elements = converts || op == Op::ScatterAdd;
    if by_elements {
        table.check_aligned()?;
        check_aligned("rows", dense.address, stride, dense.dtype.len())?;
    }
    if count == 0 {
        return Ok(None);
    }
    let needed = u128::from(count - 1) * stride as u128 + dense_len as u128;
    if needed > dense.len as u128 {
        return Err(Error::TooShort { items: "rows", count, needed, len: dense.len });
    }
    // A row that is written over indices that are still to be read; its own index was read before it.
    let is_own = dense.address == indices.address && stride == index_len;
    let is_before = |one: u64, len: u128, other: u64| u128::from(one) + len <= u128::from(other);
    let is_apart = is_before(dense.address, needed, indices.address)
        || is_before(indices.address, indices.len as u128, dense.address);
    if op == Op::Gather && stride == dense_len && !is_apart && !is_own {
        let (input, output) = (indices.address, dense.address);
        return Err(Error::Overlap { input, output, len: indices.len as u64 });
    }
    let rows = RowsRequest {
        table: table.global,
        indices: indices.address,
        count,
        rows: dense.address,
        rows_stride: stride as u64,
        row_len: row_len(table.elements, table.dtype)? as u64,
        bad,
    };
    if !by_elements {
        return Ok(Some(Request::Rows(rows)));
    }
    let (table_dtype, rows_dtype) = (table.dtype, dense.dtype);
    Ok(Some(Request::Elements(ElementsRequest { rows, elements: table.elements, table_dtype, rows_dtype })))
}

fn check_aligned(what: &'static str, address: u64, stride: usize, align: usize) -> Result<()> {
    if address.is_multiple_of(align as u64) && stride.is_multiple_of(align) {
        return Ok(());
    }
    Err(Error::Misaligned { items: what, address, stride, align })
}

/// How long a row is.
fn row_len(elements: u64, dtype: Dtype) -> Result<usize> {
    let len = usize::try_from(elements).ok().and_then(|elements| elements.checked_mul(dtype.len()));
    len.ok_or(Error::TooLong { rows: 1, row_len: usize::MAX })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: Table = Table { global: GlobalRef { rows: 10, ..ZERO }, dtype: Dtype::F32, elements: 25 };
    const ZERO: GlobalRef = GlobalRef {
        base: 0,
        rows: 0,
        first_row: 0,
        stride: 100,
        offset: 0,
        chunk_rows: 0,
        magic: 0,
        shift: 0,
        chunks: 1,
    };
    const INDICES: IndexPlace = IndexPlace { address: 4096, len: 24, kind: IndexType::I64 };
    const DENSE: DensePlace =
        DensePlace { address: 8193, len: 300, dtype: Dtype::F32, stride: None, convert: false };

    fn ask(op: Op, indices: IndexPlace, dense: DensePlace) -> Result<Option<Request>> {
        plan(op, &TABLE, &indices, &dense, 0)
    }

    #[test]
    fn rows_of_the_same_type_are_bytes_at_any_address() {
        let Some(Request::Rows(rows)) = ask(Op::Gather, INDICES, DENSE).unwrap() else { panic!("rows") };
        assert_eq!((rows.count, rows.row_len, rows.rows_stride, rows.rows), (3, 100, 100, 8193));
    }

    #[test]
    fn no_indices_are_nothing_to_do() {
        assert_eq!(ask(Op::Gather, IndexPlace { len: 0, ..INDICES }, DENSE), Ok(None));
    }

    #[test]
    fn rows_that_do_not_fit_are_refused() {
        let short = DensePlace { len: 299, ..DENSE };
        let what = "rows";
        assert_eq!(
            ask(Op::Gather, INDICES, short),
            Err(Error::TooShort { items: what, count: 3, needed: 300, len: 299 })
        );
        let strided = DensePlace { stride: Some(128), len: 2 * 128 + 100, ..DENSE };
        assert!(ask(Op::Scatter, INDICES, strided).is_ok(), "the last row needs no gap behind it");
        let narrow = DensePlace { stride: Some(96), ..DENSE };
        assert_eq!(ask(Op::Gather, INDICES, narrow), Err(Error::StrideTooShort { row_len: 100, stride: 96 }));
        let huge = DensePlace { stride: Some(usize::MAX), ..DENSE };
        let needed = 2 * usize::MAX as u128 + 100;
        assert_eq!(
            ask(Op::Gather, INDICES, huge),
            Err(Error::TooShort { items: what, count: 3, needed, len: 300 })
        );
    }

    #[test]
    fn no_index_is_overwritten_before_it_is_read() {
        let over = |address| Err(Error::Overlap { input: 4096, output: address, len: 24 });
        for address in [4096 - 299, 4096, 4096 + 23] {
            let dense = DensePlace { address, ..DENSE };
            assert_eq!(ask(Op::Gather, INDICES, dense), over(address), "{address}");
            assert!(ask(Op::Scatter, INDICES, dense).is_ok(), "rows and indices are both read");
        }
        for address in [4096 - 300, 4096 + 24] {
            assert!(ask(Op::Gather, INDICES, DensePlace { address, ..DENSE }).is_ok(), "{address}");
        }
        let narrow = Table { elements: 2, ..TABLE };
        let own = DensePlace { address: 4096, len: 24, ..DENSE };
        assert!(plan(Op::Gather, &narrow, &INDICES, &own, 0).is_ok(), "each row is where its index was");
        let next = DensePlace { address: 4104, ..own };
        assert_eq!(plan(Op::Gather, &narrow, &INDICES, &next, 0), over(4104));
    }

    #[test]
    fn types_agree_or_are_asked_to_be_converted() {
        let half = DensePlace { dtype: Dtype::F16, address: 8192, ..DENSE };
        let differ = Error::TypesDiffer { table: Dtype::F32, rows: Dtype::F16 };
        assert_eq!(ask(Op::Gather, INDICES, half), Err(differ));
        let asked = DensePlace { convert: true, ..half };
        let Some(Request::Elements(request)) = ask(Op::Gather, INDICES, asked).unwrap() else {
            panic!("elements")
        };
        assert_eq!((request.rows.row_len, request.rows.rows_stride, request.elements), (100, 50, 25));
        let int = DensePlace { dtype: Dtype::I32, address: 8192, convert: true, ..DENSE };
        let gather = Error::NotConvertible { from: Dtype::F32, to: Dtype::I32 };
        assert_eq!(ask(Op::Gather, INDICES, int), Err(gather));
        let scatter = Error::NotConvertible { from: Dtype::I32, to: Dtype::F32 };
        assert_eq!(ask(Op::Scatter, INDICES, int), Err(scatter));
        let same = DensePlace { convert: true, ..DENSE };
        assert!(matches!(ask(Op::Gather, INDICES, same), Ok(Some(Request::Rows(_)))));
    }

    #[test]
    fn elements_that_are_no_numbers_are_only_copied() {
        let table = Table { dtype: Dtype::Bool, ..TABLE };
        let ask = |op, dtype| plan(op, &table, &INDICES, &DensePlace { dtype, convert: true, ..DENSE }, 0);
        for dtype in [Dtype::Bool, Dtype::U8] {
            let Ok(Some(Request::Rows(rows))) = ask(Op::Scatter, dtype) else { panic!("rows of {dtype}") };
            assert_eq!(rows.row_len, 25);
            let no_sum = Error::OpNotForType { op: ReduceOp::Sum, dtype: Dtype::Bool };
            assert_eq!(ask(Op::ScatterAdd, dtype), Err(no_sum));
        }
        for to in [Dtype::I32, Dtype::Float8E5m2] {
            assert_eq!(ask(Op::Gather, to), Err(Error::NotConvertible { from: Dtype::Bool, to }));
        }
        let numbers = Table { dtype: Dtype::U8, ..TABLE };
        let bools = DensePlace { dtype: Dtype::Bool, ..DENSE };
        let differ = Error::TypesDiffer { table: Dtype::U8, rows: Dtype::Bool };
        assert_eq!(plan(Op::Scatter, &numbers, &INDICES, &bools, 0), Err(differ));
    }

    #[test]
    fn elements_and_indices_are_aligned() {
        let misaligned =
            |what, address, stride, align| Err(Error::Misaligned { items: what, address, stride, align });
        assert_eq!(ask(Op::ScatterAdd, INDICES, DENSE), misaligned("rows", 8193, 100, 4));
        let between = DensePlace { address: 8192, stride: Some(102), ..DENSE };
        assert_eq!(ask(Op::ScatterAdd, INDICES, between), misaligned("rows", 8192, 102, 4));
        let odd = IndexPlace { address: 4100, ..INDICES };
        assert_eq!(ask(Op::Gather, odd, DENSE), misaligned("indices", 4100, 24, 8));
        let cut = IndexPlace { len: 23, ..INDICES };
        assert_eq!(ask(Op::Gather, cut, DENSE), misaligned("indices", 4096, 23, 8));
    }

    #[test]
    fn elements_of_the_table_are_aligned_where_they_are_looked_at() {
        let asked = DensePlace { address: 8192, dtype: Dtype::F16, convert: true, ..DENSE };
        let refused = |address, stride| {
            Err(Error::Misaligned { items: "rows of the table", address, stride, align: 4 })
        };
        let of = |global| Table { global, ..TABLE };
        let gather = |global, dense| plan(Op::Gather, &of(global), &INDICES, &dense, 0);
        let odd = GlobalRef { base: 4096, stride: 101, ..TABLE.global };
        assert_eq!(gather(odd, asked), refused(4096, 101));
        assert!(gather(odd, DENSE).is_ok(), "bytes are moved from any address");
        let behind = GlobalRef { base: 4097, ..TABLE.global };
        assert_eq!(gather(behind, asked), refused(4097, 100));
        // Of chunks, the base is where their addresses are.
        let chunked = GlobalRef { base: 4097, chunks: 3, offset: 8, ..TABLE.global };
        assert!(gather(chunked, asked).is_ok());
        assert_eq!(gather(GlobalRef { offset: 2, ..chunked }, asked), refused(2, 100));
        let sum = DensePlace { address: 8192, ..DENSE };
        assert_eq!(plan(Op::ScatterAdd, &of(odd), &INDICES, &sum, 0), refused(4096, 101));
    }
}
