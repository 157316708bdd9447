//! Element types and reduction operations.

use std::ffi::{CStr, c_char};
use std::ptr;

use wholemem::{Dtype, ReduceOp};

use crate::argument::{Output, invalid};
use crate::call::call;
use crate::failure::Result;
use crate::status::wm_status_t;

/// The type of elements: one of the constants `WM_DTYPE_...`.
pub type wm_dtype_t = u32;
/// An unsigned integer of one byte; also the type of raw bytes.
pub const WM_DTYPE_U8: wm_dtype_t = 0;
/// A signed integer of one byte.
pub const WM_DTYPE_I8: wm_dtype_t = 1;
/// An unsigned integer of two bytes.
pub const WM_DTYPE_U16: wm_dtype_t = 2;
/// A signed integer of two bytes.
pub const WM_DTYPE_I16: wm_dtype_t = 3;
/// An unsigned integer of four bytes.
pub const WM_DTYPE_U32: wm_dtype_t = 4;
/// A signed integer of four bytes.
pub const WM_DTYPE_I32: wm_dtype_t = 5;
/// An unsigned integer of eight bytes.
pub const WM_DTYPE_U64: wm_dtype_t = 6;
/// A signed integer of eight bytes.
pub const WM_DTYPE_I64: wm_dtype_t = 7;
/// A 16-bit float in the IEEE half precision format.
pub const WM_DTYPE_F16: wm_dtype_t = 8;
/// A 16-bit float with the upper half of the bits of a single precision float (bfloat16).
pub const WM_DTYPE_BF16: wm_dtype_t = 9;
/// A 32-bit float in the IEEE single precision format.
pub const WM_DTYPE_F32: wm_dtype_t = 10;
/// A 64-bit float in the IEEE double precision format.
pub const WM_DTYPE_F64: wm_dtype_t = 11;
/// A Boolean, 0 or 1, in one byte.
pub const WM_DTYPE_BOOL: wm_dtype_t = 12;
/// A complex number in eight bytes: the real and the imaginary part, both in single precision.
pub const WM_DTYPE_COMPLEX64: wm_dtype_t = 13;
/// An 8-bit float with four exponent bits, without infinities.
pub const WM_DTYPE_FLOAT8_E4M3FN: wm_dtype_t = 14;
/// An 8-bit float with four exponent bits, without infinities and negative zero.
pub const WM_DTYPE_FLOAT8_E4M3FNUZ: wm_dtype_t = 15;
/// An 8-bit float with five exponent bits.
pub const WM_DTYPE_FLOAT8_E5M2: wm_dtype_t = 16;
/// An 8-bit float with five exponent bits, without infinities and negative zero.
pub const WM_DTYPE_FLOAT8_E5M2FNUZ: wm_dtype_t = 17;
/// A power of two in one byte: eight exponent bits.
pub const WM_DTYPE_FLOAT8_E8M0FNU: wm_dtype_t = 18;

/// A reduction operation, which combines the elements of all ranks: one of the constants `WM_REDUCE_...`.
pub type wm_reduce_op_t = u32;
/// The sum of the elements; integers wrap around.
pub const WM_REDUCE_SUM: wm_reduce_op_t = 0;
/// The sum of the elements divided by the number of ranks; for integers with rounding towards zero.
pub const WM_REDUCE_AVG: wm_reduce_op_t = 1;
/// The minimum of the elements, or NaN if an element is NaN. -0 is smaller than +0.
pub const WM_REDUCE_MIN: wm_reduce_op_t = 2;
/// The maximum of the elements, or NaN if an element is NaN. +0 is larger than -0.
pub const WM_REDUCE_MAX: wm_reduce_op_t = 3;
/// The product of the elements; integers wrap around.
pub const WM_REDUCE_PROD: wm_reduce_op_t = 4;
/// The bitwise AND of the elements; integers only.
pub const WM_REDUCE_AND: wm_reduce_op_t = 5;
/// The bitwise OR of the elements; integers only.
pub const WM_REDUCE_OR: wm_reduce_op_t = 6;
/// The bitwise XOR of the elements; integers only.
pub const WM_REDUCE_XOR: wm_reduce_op_t = 7;

/// Returns the element type with a number.
#[inline]
pub(crate) fn dtype_of(number: wm_dtype_t) -> Result<Dtype> {
    Dtype::from_code(number).ok_or_else(|| invalid(format!("there is no element type {number}")))
}

/// Returns the reduction operation with a number.
#[inline]
pub(crate) fn reduce_op_of(number: wm_reduce_op_t) -> Result<ReduceOp> {
    ReduceOp::from_code(number).ok_or_else(|| invalid(format!("there is no reduction operation {number}")))
}

/// Calls a block with the Rust type as which elements of a type are stored.
macro_rules! with_storage {
    ($dtype:expr, $type:ident => $block:expr) => {
        match $dtype.storage() {
            wholemem::Dtype::I8 => {
                type $type = i8;
                $block
            }
            wholemem::Dtype::U16 => {
                type $type = u16;
                $block
            }
            wholemem::Dtype::I16 => {
                type $type = i16;
                $block
            }
            wholemem::Dtype::U32 => {
                type $type = u32;
                $block
            }
            wholemem::Dtype::I32 => {
                type $type = i32;
                $block
            }
            wholemem::Dtype::U64 => {
                type $type = u64;
                $block
            }
            wholemem::Dtype::I64 => {
                type $type = i64;
                $block
            }
            wholemem::Dtype::F16 => {
                type $type = wholemem::f16;
                $block
            }
            wholemem::Dtype::Bf16 => {
                type $type = wholemem::bf16;
                $block
            }
            wholemem::Dtype::F32 => {
                type $type = f32;
                $block
            }
            wholemem::Dtype::F64 => {
                type $type = f64;
                $block
            }
            _ => {
                type $type = u8;
                $block
            }
        }
    };
}

pub(crate) use with_storage;

/// Returns the length of an element of a type in bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn wm_dtype_len(dtype: wm_dtype_t, len: *mut usize) -> wm_status_t {
    call(|| {
        // SAFETY: the pointer is null or valid, as the header requires.
        let output = unsafe { Output::new(len, "len") }?;
        output.write(dtype_of(dtype)?.len());
        Ok(())
    })
}

/// Returns the name of an element type as in numpy, such as `float32`; null for a number that this library does not have.
///
/// The text is valid as long as the library is loaded. The call does not change the last error.
#[unsafe(no_mangle)]
pub extern "C" fn wm_dtype_name(dtype: wm_dtype_t) -> *const c_char {
    const NAMES: [&CStr; Dtype::ALL.len()] = [
        c"uint8",
        c"int8",
        c"uint16",
        c"int16",
        c"uint32",
        c"int32",
        c"uint64",
        c"int64",
        c"float16",
        c"bfloat16",
        c"float32",
        c"float64",
        c"bool",
        c"complex64",
        c"float8_e4m3fn",
        c"float8_e4m3fnuz",
        c"float8_e5m2",
        c"float8_e5m2fnuz",
        c"float8_e8m0fnu",
    ];
    NAMES.get(dtype as usize).map_or(ptr::null(), |name| name.as_ptr())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn element_types_have_the_numbers_and_names_of_rust() {
        let constants = [
            (WM_DTYPE_U8, Dtype::U8),
            (WM_DTYPE_I8, Dtype::I8),
            (WM_DTYPE_U16, Dtype::U16),
            (WM_DTYPE_I16, Dtype::I16),
            (WM_DTYPE_U32, Dtype::U32),
            (WM_DTYPE_I32, Dtype::I32),
            (WM_DTYPE_U64, Dtype::U64),
            (WM_DTYPE_I64, Dtype::I64),
            (WM_DTYPE_F16, Dtype::F16),
            (WM_DTYPE_BF16, Dtype::Bf16),
            (WM_DTYPE_F32, Dtype::F32),
            (WM_DTYPE_F64, Dtype::F64),
            (WM_DTYPE_BOOL, Dtype::Bool),
            (WM_DTYPE_COMPLEX64, Dtype::Complex64),
            (WM_DTYPE_FLOAT8_E4M3FN, Dtype::Float8E4m3fn),
            (WM_DTYPE_FLOAT8_E4M3FNUZ, Dtype::Float8E4m3fnuz),
            (WM_DTYPE_FLOAT8_E5M2, Dtype::Float8E5m2),
            (WM_DTYPE_FLOAT8_E5M2FNUZ, Dtype::Float8E5m2fnuz),
            (WM_DTYPE_FLOAT8_E8M0FNU, Dtype::Float8E8m0fnu),
        ];
        assert_eq!(constants.map(|(_, dtype)| dtype), Dtype::ALL);
        for (number, dtype) in constants {
            assert_eq!((dtype.code(), dtype_of(number).unwrap()), (number, dtype));
            // SAFETY: the text is static.
            let name = unsafe { CStr::from_ptr(wm_dtype_name(number)) };
            assert_eq!(name.to_str().unwrap(), dtype.info().python_name);
            let stored = with_storage!(dtype, T => size_of::<T>());
            assert_eq!(stored, dtype.storage().len(), "{dtype}");
        }
        assert!(wm_dtype_name(19).is_null());
        assert!(dtype_of(19).is_err());
    }

    #[test]
    fn reduction_operations_have_the_numbers_of_rust() {
        let constants = [
            WM_REDUCE_SUM,
            WM_REDUCE_AVG,
            WM_REDUCE_MIN,
            WM_REDUCE_MAX,
            WM_REDUCE_PROD,
            WM_REDUCE_AND,
            WM_REDUCE_OR,
            WM_REDUCE_XOR,
        ];
        assert_eq!(constants.map(|number| reduce_op_of(number).unwrap()), ReduceOp::ALL);
        assert!(reduce_op_of(8).is_err());
    }
}
