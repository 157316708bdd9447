//! Shape, strides and element type of an array, and the range of memory that they span.

use super::element::Element;
use crate::error::Exception;

/// The element type, shape and strides of an array. Strides are in elements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) element: Element,
    pub(crate) shape: Vec<i64>,
    pub(crate) strides: Vec<i64>,
}

/// Returns true if elements with the given shape and strides are contiguous in C order. Empty strides stand for contiguous
/// elements.
pub(crate) fn are_contiguous(shape: &[i64], strides: &[i64]) -> bool {
    let mut step = 1_i64;
    for (len, stride) in shape.iter().zip(strides).rev() {
        if *len > 1 && *stride != step {
            // The strides do not match, but an array without elements is contiguous whatever its strides are.
            return shape.contains(&0);
        }
        step = step.saturating_mul((*len).max(1));
    }
    true
}

/// Returns how many bytes an array spans before the address of its first element (with negative strides), and how many from that
/// address on.
pub(crate) fn extent_of(
    element: Element,
    shape: &[i64],
    strides: &[i64],
) -> Result<(usize, usize), Exception> {
    if shape.contains(&0) {
        return Ok((0, 0));
    }
    let (mut before, mut behind) = (0_u64, 1_u64);
    for (stride, len) in strides.iter().zip(shape) {
        let reach = stride.unsigned_abs().checked_mul(len.unsigned_abs() - 1).ok_or_else(too_large)?;
        let side = if *stride < 0 { &mut before } else { &mut behind };
        *side = side.checked_add(reach).ok_or_else(too_large)?;
    }
    let bytes = |elements: u64| {
        let bytes = usize::try_from(elements).ok().and_then(|count| count.checked_mul(element.len()));
        bytes.filter(|bytes| isize::try_from(*bytes).is_ok()).ok_or_else(too_large)
    };
    Ok((bytes(before)?, bytes(behind)?))
}

impl Layout {
    /// Creates a contiguous layout in C order (the last dimension is the fastest).
    pub(crate) fn contiguous(element: Element, shape: &[i64]) -> Result<Self, Exception> {
        let mut strides = vec![0; shape.len()];
        let mut step = 1_i64;
        for (stride, len) in strides.iter_mut().zip(shape).rev() {
            *stride = step;
            if *len < 0 {
                return Err(Exception::new(
                    "WrongValue",
                    format!("a dimension cannot have the length {len}"),
                ));
            }
            step = step.checked_mul((*len).max(1)).ok_or_else(too_large)?;
        }
        let layout = Self { element, shape: shape.to_vec(), strides };
        layout.checked_len()?;
        Ok(layout)
    }

    /// Creates a layout with the given strides, in elements.
    pub(crate) fn strided(element: Element, shape: Vec<i64>, strides: Vec<i64>) -> Result<Self, Exception> {
        if shape.len() != strides.len() {
            let (shape, strides) = (shape.len(), strides.len());
            return Err(Exception::new(
                "WrongValue",
                format!("a shape of {shape} dimensions has {strides} strides"),
            ));
        }
        let mut layout = Self::contiguous(element, &shape)?;
        // In a dimension of length 1 the stride has no meaning, and producers set arbitrary values.
        for ((own, stride), len) in layout.strides.iter_mut().zip(strides).zip(&shape) {
            if *len > 1 {
                *own = stride;
            }
        }
        layout.extent()?;
        Ok(layout)
    }

    /// Returns the number of elements of an array with this layout.
    pub(crate) fn count(&self) -> usize {
        // The lengths were checked when the layout was created: none is negative, and the product does not overflow.
        self.shape.iter().map(|len| usize::try_from(*len).unwrap_or(0)).product()
    }

    /// Returns the size of the array's elements in bytes, without the gaps between them.
    pub(crate) fn len(&self) -> usize {
        self.count() * self.element.len()
    }

    fn checked_len(&self) -> Result<usize, Exception> {
        let sum = self
            .shape
            .iter()
            .try_fold(self.element.len(), |product, len| product.checked_mul(usize::try_from(*len).ok()?));
        sum.filter(|len| isize::try_from(*len).is_ok()).ok_or_else(too_large)
    }

    /// Returns how many bytes an array spans before the address of its first element (with negative strides), and how many from
    /// that address on.
    pub(crate) fn extent(&self) -> Result<(usize, usize), Exception> {
        extent_of(self.element, &self.shape, &self.strides)
    }

    /// Returns true if the elements are contiguous in C order (the last dimension is the fastest).
    pub(crate) fn is_contiguous(&self) -> bool {
        are_contiguous(&self.shape, &self.strides)
    }
}

fn too_large() -> Exception {
    Exception::new("WrongValue", "an array cannot be larger than the address space")
}
