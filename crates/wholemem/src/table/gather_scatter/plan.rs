//! Checks the operands of a gather or scatter and plans the request to its kernel, without accessing memory.

use super::RowOp;
use crate::abi::{ElementsRequest, GlobalRef, IndexType, RowsRequest};
use crate::{Dtype, Error, ReduceOp, Result};
use wholemem_os::width::to_usize;

/// The table operand of a gather or scatter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct TableOperand {
    pub(crate) global: GlobalRef,
    pub(crate) dtype: Dtype,
    /// The number of elements in a row of the table.
    pub(crate) elements: u64,
}

impl TableOperand {
    /// Checks that the elements of the table are aligned. They may be misaligned, because a view of raw memory can have rows of
    /// any length.
    fn check_aligned(&self) -> Result<()> {
        let GlobalRef { base, offset, stride, chunks, .. } = self.global;
        // The chunks of a table begin at granules, so their addresses need no check.
        let first = if chunks == 1 { base } else { offset };
        check_aligned("rows of the table", first, to_usize(stride), self.dtype.len())
    }
}

/// The address, length and type of the indices of a gather or scatter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct IndexOperand {
    pub(crate) address: u64,
    pub(crate) len: usize,
    pub(crate) kind: IndexType,
}

/// The address, length, element type and stride of the row buffer of a gather or scatter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct RowBufferOperand {
    pub(crate) address: u64,
    pub(crate) len: usize,
    pub(crate) dtype: Dtype,
    pub(crate) stride: Option<usize>,
    pub(crate) convert: bool,
}

/// The request to a gather or scatter kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum KernelRequest {
    /// The kernel copies rows as bytes.
    Rows(RowsRequest),
    /// The kernel converts or adds rows element by element.
    Elements(ElementsRequest),
}

impl KernelRequest {
    /// Returns the addresses and lengths of the rows, which both kinds of request have.
    pub(crate) fn rows(&self) -> &RowsRequest {
        match self {
            Self::Rows(rows) => rows,
            Self::Elements(request) => &request.rows,
        }
    }
}

/// Checks the operands of a gather or scatter and returns the request to its kernel; `None` if there are no rows.
pub(crate) fn plan(
    op: RowOp,
    table: &TableOperand,
    indices: &IndexOperand,
    dense: &RowBufferOperand,
    bad: u64,
) -> Result<Option<KernelRequest>> {
    let index_len = indices.kind.len();
    check_aligned("indices", indices.address, indices.len, index_len)?;
    if op == RowOp::ScatterAdd && !table.dtype.is_number() {
        return Err(Error::OpNotForType { op: ReduceOp::Sum, dtype: table.dtype });
    }
    // Copies use the storage type of the table, so the row buffer may have the storage type instead of the element type.
    let converts = dense.dtype != table.dtype && dense.dtype != table.dtype.storage();
    if converts && !dense.convert {
        return Err(Error::TypesDiffer { table: table.dtype, rows: dense.dtype });
    }
    if converts && !dense.dtype.converts_to(table.dtype) {
        let (from, to) =
            if op == RowOp::Gather { (table.dtype, dense.dtype) } else { (dense.dtype, table.dtype) };
        return Err(Error::NotConvertible { from, to });
    }
    let count = (indices.len / index_len) as u64;
    let dense_len = row_len(table.elements, dense.dtype)?;
    let stride = dense.stride.unwrap_or(dense_len);
    if stride < dense_len {
        return Err(Error::StrideTooShort { row_len: dense_len, stride });
    }
    let by_elements = converts || op == RowOp::ScatterAdd;
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
    // A gather must not overwrite indices that are not yet read. The output row of an index may overwrite that index, which is
    // read first.
    let is_own = dense.address == indices.address && stride == index_len;
    let is_before = |one: u64, len: u128, other: u64| u128::from(one) + len <= u128::from(other);
    let is_apart = is_before(dense.address, needed, indices.address)
        || is_before(indices.address, indices.len as u128, dense.address);
    if op == RowOp::Gather && stride == dense_len && !is_apart && !is_own {
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
        return Ok(Some(KernelRequest::Rows(rows)));
    }
    let (table_dtype, rows_dtype) = (table.dtype, dense.dtype);
    Ok(Some(KernelRequest::Elements(ElementsRequest {
        rows,
        elements: table.elements,
        table_dtype,
        rows_dtype,
    })))
}

fn check_aligned(items: &'static str, address: u64, stride: usize, align: usize) -> Result<()> {
    if address.is_multiple_of(align as u64) && stride.is_multiple_of(align) {
        return Ok(());
    }
    Err(Error::Misaligned { items, address, stride, align })
}

/// Returns the length in bytes of a row with the given number of elements.
fn row_len(elements: u64, dtype: Dtype) -> Result<usize> {
    let len = usize::try_from(elements).ok().and_then(|elements| elements.checked_mul(dtype.len()));
    len.ok_or(Error::TooLong { rows: 1, row_len: usize::MAX })
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: TableOperand =
        TableOperand { global: GlobalRef { rows: 10, ..ZERO }, dtype: Dtype::F32, elements: 25 };
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
    const INDICES: IndexOperand = IndexOperand { address: 4096, len: 24, kind: IndexType::I64 };
    const DENSE: RowBufferOperand =
        RowBufferOperand { address: 8193, len: 300, dtype: Dtype::F32, stride: None, convert: false };

    fn plan_request(
        op: RowOp,
        indices: IndexOperand,
        dense: RowBufferOperand,
    ) -> Result<Option<KernelRequest>> {
        plan(op, &TABLE, &indices, &dense, 0)
    }

    #[test]
    fn rows_of_the_same_type_are_copied_as_bytes_at_any_address() {
        let Some(KernelRequest::Rows(rows)) = plan_request(RowOp::Gather, INDICES, DENSE).unwrap() else {
            panic!("rows")
        };
        assert_eq!((rows.count, rows.row_len, rows.rows_stride, rows.rows), (3, 100, 100, 8193));
    }

    #[test]
    fn a_call_without_indices_has_no_request() {
        assert_eq!(plan_request(RowOp::Gather, IndexOperand { len: 0, ..INDICES }, DENSE), Ok(None));
    }

    #[test]
    fn rows_that_do_not_fit_are_rejected() {
        let short = RowBufferOperand { len: 299, ..DENSE };
        let items = "rows";
        assert_eq!(
            plan_request(RowOp::Gather, INDICES, short),
            Err(Error::TooShort { items, count: 3, needed: 300, len: 299 })
        );
        let strided = RowBufferOperand { stride: Some(128), len: 2 * 128 + 100, ..DENSE };
        assert!(
            plan_request(RowOp::Scatter, INDICES, strided).is_ok(),
            "the last row needs no padding after it"
        );
        let narrow = RowBufferOperand { stride: Some(96), ..DENSE };
        assert_eq!(
            plan_request(RowOp::Gather, INDICES, narrow),
            Err(Error::StrideTooShort { row_len: 100, stride: 96 })
        );
        let huge = RowBufferOperand { stride: Some(usize::MAX), ..DENSE };
        let needed = 2 * usize::MAX as u128 + 100;
        assert_eq!(
            plan_request(RowOp::Gather, INDICES, huge),
            Err(Error::TooShort { items, count: 3, needed, len: 300 })
        );
    }

    #[test]
    fn outputs_that_overlap_unread_indices_are_rejected() {
        let over = |address| Err(Error::Overlap { input: 4096, output: address, len: 24 });
        for address in [4096 - 299, 4096, 4096 + 23] {
            let dense = RowBufferOperand { address, ..DENSE };
            assert_eq!(plan_request(RowOp::Gather, INDICES, dense), over(address), "{address}");
            assert!(
                plan_request(RowOp::Scatter, INDICES, dense).is_ok(),
                "a scatter only reads rows and indices"
            );
        }
        for address in [4096 - 300, 4096 + 24] {
            assert!(
                plan_request(RowOp::Gather, INDICES, RowBufferOperand { address, ..DENSE }).is_ok(),
                "{address}"
            );
        }
        let narrow = TableOperand { elements: 2, ..TABLE };
        let own = RowBufferOperand { address: 4096, len: 24, ..DENSE };
        assert!(
            plan(RowOp::Gather, &narrow, &INDICES, &own, 0).is_ok(),
            "each row overwrites only its own index"
        );
        let next = RowBufferOperand { address: 4104, ..own };
        assert_eq!(plan(RowOp::Gather, &narrow, &INDICES, &next, 0), over(4104));
    }

    #[test]
    fn types_must_match_unless_conversion_is_requested() {
        let half = RowBufferOperand { dtype: Dtype::F16, address: 8192, ..DENSE };
        let differ = Error::TypesDiffer { table: Dtype::F32, rows: Dtype::F16 };
        assert_eq!(plan_request(RowOp::Gather, INDICES, half), Err(differ));
        let converted = RowBufferOperand { convert: true, ..half };
        let Some(KernelRequest::Elements(request)) = plan_request(RowOp::Gather, INDICES, converted).unwrap()
        else {
            panic!("elements")
        };
        assert_eq!((request.rows.row_len, request.rows.rows_stride, request.elements), (100, 50, 25));
        let int = RowBufferOperand { dtype: Dtype::I32, address: 8192, convert: true, ..DENSE };
        let gather = Error::NotConvertible { from: Dtype::F32, to: Dtype::I32 };
        assert_eq!(plan_request(RowOp::Gather, INDICES, int), Err(gather));
        let scatter = Error::NotConvertible { from: Dtype::I32, to: Dtype::F32 };
        assert_eq!(plan_request(RowOp::Scatter, INDICES, int), Err(scatter));
        let same = RowBufferOperand { convert: true, ..DENSE };
        assert!(matches!(plan_request(RowOp::Gather, INDICES, same), Ok(Some(KernelRequest::Rows(_)))));
    }

    #[test]
    fn types_that_are_not_numbers_are_only_copied() {
        let table = TableOperand { dtype: Dtype::Bool, ..TABLE };
        let plan_request =
            |op, dtype| plan(op, &table, &INDICES, &RowBufferOperand { dtype, convert: true, ..DENSE }, 0);
        for dtype in [Dtype::Bool, Dtype::U8] {
            let Ok(Some(KernelRequest::Rows(rows))) = plan_request(RowOp::Scatter, dtype) else {
                panic!("rows of {dtype}")
            };
            assert_eq!(rows.row_len, 25);
            let no_sum = Error::OpNotForType { op: ReduceOp::Sum, dtype: Dtype::Bool };
            assert_eq!(plan_request(RowOp::ScatterAdd, dtype), Err(no_sum));
        }
        for to in [Dtype::I32, Dtype::Float8E5m2] {
            assert_eq!(plan_request(RowOp::Gather, to), Err(Error::NotConvertible { from: Dtype::Bool, to }));
        }
        let numbers = TableOperand { dtype: Dtype::U8, ..TABLE };
        let bools = RowBufferOperand { dtype: Dtype::Bool, ..DENSE };
        let differ = Error::TypesDiffer { table: Dtype::U8, rows: Dtype::Bool };
        assert_eq!(plan(RowOp::Scatter, &numbers, &INDICES, &bools, 0), Err(differ));
    }

    #[test]
    fn misaligned_elements_and_indices_are_rejected() {
        let misaligned =
            |items, address, stride, align| Err(Error::Misaligned { items, address, stride, align });
        assert_eq!(plan_request(RowOp::ScatterAdd, INDICES, DENSE), misaligned("rows", 8193, 100, 4));
        let between = RowBufferOperand { address: 8192, stride: Some(102), ..DENSE };
        assert_eq!(plan_request(RowOp::ScatterAdd, INDICES, between), misaligned("rows", 8192, 102, 4));
        let odd = IndexOperand { address: 4100, ..INDICES };
        assert_eq!(plan_request(RowOp::Gather, odd, DENSE), misaligned("indices", 4100, 24, 8));
        let cut = IndexOperand { len: 23, ..INDICES };
        assert_eq!(plan_request(RowOp::Gather, cut, DENSE), misaligned("indices", 4096, 23, 8));
    }

    #[test]
    fn the_table_must_be_aligned_for_conversion_and_addition() {
        let converted = RowBufferOperand { address: 8192, dtype: Dtype::F16, convert: true, ..DENSE };
        let misaligned = |address, stride| {
            Err(Error::Misaligned { items: "rows of the table", address, stride, align: 4 })
        };
        let of = |global| TableOperand { global, ..TABLE };
        let gather = |global, dense| plan(RowOp::Gather, &of(global), &INDICES, &dense, 0);
        let odd = GlobalRef { base: 4096, stride: 101, ..TABLE.global };
        assert_eq!(gather(odd, converted), misaligned(4096, 101));
        assert!(gather(odd, DENSE).is_ok(), "bytes are copied from any address");
        let offset_by_one = GlobalRef { base: 4097, ..TABLE.global };
        assert_eq!(gather(offset_by_one, converted), misaligned(4097, 100));
        // In chunked memory the base is the address of the directory, so its alignment does not matter.
        let chunked = GlobalRef { base: 4097, chunks: 3, offset: 8, ..TABLE.global };
        assert!(gather(chunked, converted).is_ok());
        assert_eq!(gather(GlobalRef { offset: 2, ..chunked }, converted), misaligned(2, 100));
        let sum = RowBufferOperand { address: 8192, ..DENSE };
        assert_eq!(plan(RowOp::ScatterAdd, &of(odd), &INDICES, &sum, 0), misaligned(4096, 101));
    }
}
