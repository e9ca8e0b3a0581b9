//! Assigns blocks to a few buffers: each gather takes the buffer that was taken longest ago.

/// Buffers that blocks take in turn.
#[derive(Debug)]
pub(super) struct Rotation {
    /// The unit in each buffer.
    units: Vec<Option<usize>>,
    next: usize,
}

impl Rotation {
    pub(super) fn new(count: usize) -> Self {
        Self {
            units: vec![None; count],
            next: 0,
        }
    }

    /// Assigns the next buffer to `unit`.
    pub(super) fn assign(&mut self, unit: usize) -> usize {
        let at = self.next;
        self.units[at] = Some(unit);
        self.next = (at + 1) % self.units.len();
        at
    }

    /// Returns the buffer that holds `unit`: the newest, because an older one may still hold the unit from
    /// forward.
    pub(super) fn at(&self, unit: usize) -> usize {
        let count = self.units.len();
        (1..=count)
            .map(|back| (self.next + count - back) % count)
            .find(|&at| self.units[at] == Some(unit))
            .expect("a unit is gathered before it is used")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_oldest_buffer_is_taken_and_the_newest_found() {
        let mut rotation = Rotation::new(3);
        assert_eq!([1, 2, 3].map(|unit| rotation.assign(unit)), [0, 1, 2]);
        assert_eq!(rotation.assign(3), 0);
        assert_eq!((rotation.at(3), rotation.at(2)), (0, 1));
    }
}
