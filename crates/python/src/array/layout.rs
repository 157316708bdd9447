//! How the elements of an array lie in memory, and whether they lie as a call needs them.

use wholemem_hal::Rights;

use super::element::Element;
use crate::error::Raised;

/// Shape and strides of an array, both in elements.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) element: Element,
    pub(crate) shape: Vec<i64>,
    pub(crate) strides: Vec<i64>,
}

/// Whether elements at these distances follow each other without a gap.
pub(super) fn are_gapless(shape: &[i64], strides: &[i64]) -> bool {
    let mut step = 1_i64;
    for (len, stride) in shape.iter().zip(strides).rev() {
        if *len > 1 && *stride != step {
            return false;
        }
        step = step.saturating_mul((*len).max(1));
    }
    true
}

/// An array as rows at equal distances, each without a gap.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Rows {
    pub(crate) count: usize,
    pub(crate) len: usize,
    /// Bytes from one to the next.
    pub(crate) stride: usize,
}

impl Layout {
    /// Elements that follow each other without a gap, the last dimension fastest.
    pub(crate) fn contiguous(element: Element, shape: &[i64]) -> Result<Self, Raised> {
        let mut strides = vec![0; shape.len()];
        let mut step = 1_i64;
        for (stride, len) in strides.iter_mut().zip(shape).rev() {
            *stride = step;
            if *len < 0 {
                return Err(Raised::new("WrongValue", format!("a dimension cannot have {len} elements")));
            }
            step = step.checked_mul((*len).max(1)).ok_or_else(too_large)?;
        }
        let layout = Self { element, shape: shape.to_vec(), strides };
        layout.checked_len()?;
        Ok(layout)
    }

    /// Elements at given distances.
    pub(crate) fn strided(element: Element, shape: Vec<i64>, strides: Vec<i64>) -> Result<Self, Raised> {
        if shape.len() != strides.len() {
            let (shape, strides) = (shape.len(), strides.len());
            return Err(Raised::new("WrongValue", format!("{shape} dimensions have {strides} strides")));
        }
        let mut layout = Self::contiguous(element, &shape)?;
        // The distance of the only element to the next means nothing, and is whatever its maker likes.
        for ((own, given), len) in layout.strides.iter_mut().zip(strides).zip(&shape) {
            if *len > 1 {
                *own = given;
            }
        }
        layout.extent()?;
        Ok(layout)
    }

    /// How many elements there are.
    pub(crate) fn count(&self) -> usize {
        // Checked when it was made.
        self.shape.iter().map(|len| usize::try_from(*len).unwrap_or(0)).product()
    }

    /// How many bytes they take without gaps.
    pub(crate) fn len(&self) -> usize {
        self.count() * self.element.len()
    }

    fn checked_len(&self) -> Result<usize, Raised> {
        let sum = self
            .shape
            .iter()
            .try_fold(self.element.len(), |product, len| product.checked_mul(usize::try_from(*len).ok()?));
        sum.filter(|len| isize::try_from(*len).is_ok()).ok_or_else(too_large)
    }

    /// How many bytes there are before the first element's beginning, and from there to the end of the last.
    pub(crate) fn extent(&self) -> Result<(usize, usize), Raised> {
        if self.count() == 0 {
            return Ok((0, 0));
        }
        let (mut before, mut behind) = (0_u64, 1_u64);
        for (stride, len) in self.strides.iter().zip(&self.shape) {
            let reach = stride.unsigned_abs().checked_mul(len.unsigned_abs() - 1).ok_or_else(too_large)?;
            let side = if *stride < 0 { &mut before } else { &mut behind };
            *side = side.checked_add(reach).ok_or_else(too_large)?;
        }
        let bytes = |elements: u64| {
            let bytes =
                usize::try_from(elements).ok().and_then(|count| count.checked_mul(self.element.len()));
            bytes.filter(|bytes| isize::try_from(*bytes).is_ok()).ok_or_else(too_large)
        };
        Ok((bytes(before)?, bytes(behind)?))
    }

    /// Whether the elements follow each other without a gap, the last dimension fastest.
    pub(crate) fn is_contiguous(&self) -> bool {
        self.gapless_from(0) || self.count() == 0
    }

    /// Whether the elements of the dimensions from `first` on follow each other without a gap.
    fn gapless_from(&self, first: usize) -> bool {
        are_gapless(&self.shape[first..], &self.strides[first..])
    }

    /// The array as rows of its first dimension.
    pub(crate) fn rows(&self, what: &str, rights: Rights) -> Result<Rows, Raised> {
        let Some((count, inner)) = self.shape.split_first() else {
            return Err(Raised::new("WrongValue", format!("{what} must have rows, and is a single number")));
        };
        let size = |len: i64| usize::try_from(len).unwrap_or(0);
        let (count, len) = (size(*count), inner.iter().map(|len| size(*len)).product::<usize>());
        let len = len * self.element.len();
        if count == 0 || len == 0 {
            return Ok(Rows { count, len, stride: len });
        }
        let stride = if count == 1 { len } else { self.row_stride(what, rights)? };
        if !self.gapless_from(1) || stride < len {
            let message =
                format!("the rows of {what} have gaps: strides {:?} of shape {:?}", self.strides, self.shape);
            return Err(Raised::new("WrongStride", message).hint(instead_of_gaps(rights)));
        }
        Ok(Rows { count, len, stride })
    }

    fn row_stride(&self, what: &str, rights: Rights) -> Result<usize, Raised> {
        let stride = self.strides.first().copied().unwrap_or(0);
        let bytes = usize::try_from(stride).ok().filter(|stride| *stride > 0);
        bytes.and_then(|stride| stride.checked_mul(self.element.len())).ok_or_else(|| {
            let message = format!("the rows of {what} are {stride} elements apart, not one after the other");
            Raised::new("WrongStride", message).hint(instead_of_gaps(rights))
        })
    }

    /// An error unless the elements follow each other without a gap, to be read, or also written.
    pub(crate) fn check_contiguous(&self, what: &str, rights: Rights) -> Result<(), Raised> {
        if self.is_contiguous() {
            return Ok(());
        }
        let message =
            format!("{what} is not contiguous: strides {:?} of shape {:?}", self.strides, self.shape);
        Err(Raised::new("WrongStride", message).hint(instead_of_gaps(rights)))
    }

    /// An error unless the shape is this one.
    pub(crate) fn check_shape(&self, what: &str, shape: &[i64]) -> Result<(), Raised> {
        if self.shape == shape {
            return Ok(());
        }
        let message = format!("{what} must have the shape {shape:?}, and has {:?}", self.shape);
        Err(Raised::new("WrongValue", message))
    }
}

/// What can be done about an array with gaps. What is made contiguous is a copy, and not what was to be written.
fn instead_of_gaps(rights: Rights) -> &'static str {
    match rights {
        Rights::None | Rights::Read => "make it contiguous first",
        Rights::ReadWrite => "give one without gaps, and copy from it",
    }
}

fn too_large() -> Raised {
    Raised::new("WrongValue", "an array cannot be larger than the address space")
}
