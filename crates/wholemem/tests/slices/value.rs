//! Test values of every element type. Floats are small integers, so that sums of a few hundred of them are exact.

use half::{bf16, f16};

pub(crate) trait TestValue: Copy {
    /// Returns the test value for a number from 0 to 6.
    fn of(number: u8) -> Self;

    /// Returns the sum of two elements, or `None` if the elements are not numbers. Integers wrap around.
    fn plus(self, other: Self) -> Option<Self>;
}

macro_rules! integers {
    ($($type:ty)*) => {$(
        impl TestValue for $type {
            fn of(number: u8) -> Self {
                // The test values of integers are large or negative, so that all bytes matter.
                <$type>::MAX.wrapping_sub(<$type>::from(number % 3 == 0) * 3).wrapping_add(number as $type)
            }

            fn plus(self, other: Self) -> Option<Self> {
                Some(self.wrapping_add(other))
            }
        }
    )*};
}

integers!(u8 i8 u16 i16 u32 i32 u64 i64);

macro_rules! floats {
    ($($type:ty)*) => {$(
        impl TestValue for $type {
            fn of(number: u8) -> Self {
                <$type>::from(f32::from(number) - 3.0)
            }

            fn plus(self, other: Self) -> Option<Self> {
                Some(self + other)
            }
        }
    )*};
}

floats!(f32 f64);

macro_rules! halves {
    ($($type:ty)*) => {$(
        impl TestValue for $type {
            fn of(number: u8) -> Self {
                // The test values of 16-bit floats are -1, 0 and 1, so that sums are exact also in bf16.
                <$type>::from_f32(f32::from(number % 3) - 1.0)
            }

            fn plus(self, other: Self) -> Option<Self> {
                Some(self + other)
            }
        }
    )*};
}

halves!(f16 bf16);

impl TestValue for [f32; 2] {
    fn of(number: u8) -> Self {
        [f32::from(number), -1.5]
    }

    fn plus(self, _: Self) -> Option<Self> {
        None
    }
}
