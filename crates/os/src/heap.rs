//! Memory that the allocator of this process keeps after it was freed.
//!
//! ```
//! drop(vec![0_u8; 1 << 20]);
//! wholemem_os::heap::trim();
//! ```

/// Gives memory that was freed back to the system, as far as the allocator can: glibc's keeps freed memory for reuse. It walks
/// over all free memory, so it is for moments after much was freed.
#[doc(alias = "malloc_trim")]
pub fn trim() {
    #[cfg(target_env = "gnu")]
    // SAFETY: the function takes no pointers, and locks the allocator's own arenas.
    unsafe {
        libc::malloc_trim(0);
    }
}

#[cfg(test)]
mod tests {
    #[test]
    fn memory_is_usable_after_a_trim() {
        let kept = vec![7_u8; 100_000];
        drop(vec![1_u8; 1 << 20]);
        super::trim();
        assert!(kept.iter().all(|byte| *byte == 7));
    }
}
