//! Operations that wait for the kernel, by device.
//!
//! The kernel takes a limited number of operations. Each device has an equal part of that number, so that a device that stops
//! answering fills its own part only. Devices take turns, so that none waits until another's backlog is handed over. A core:
//! no clock, thread or file.

use std::collections::VecDeque;

use offload_api::ids::DeviceIndex;

/// All devices' backlogs.
#[derive(Debug)]
pub(super) struct Backlog {
    /// By device; `None` after its removal.
    lanes: Vec<Option<Lane>>,
    /// Operations the kernel takes at a time.
    room: usize,
    /// Index of the device whose turn it is.
    next: usize,
    waiting_count: usize,
    kernel_count: usize,
}

#[derive(Debug, Default)]
struct Lane {
    /// Places of operations, the oldest first.
    backlog: VecDeque<usize>,
    kernel_count: usize,
}

impl Backlog {
    /// Makes a backlog without devices, for a kernel with room for `room` operations.
    pub(super) fn new(room: usize) -> Self {
        Self {
            lanes: Vec::new(),
            room,
            next: 0,
            waiting_count: 0,
            kernel_count: 0,
        }
    }

    /// Adds a device, behind the others. Their parts shrink; their operations in the kernel stay there.
    pub(super) fn add(&mut self) {
        self.lanes.push(Some(Lane::default()));
    }

    /// Gives a device's part to the others. Nothing may be in flight on it, now or later.
    pub(super) fn remove(&mut self, device: DeviceIndex) {
        self.lanes[device.0 as usize] = None;
    }

    /// Queues the operation at `place`.
    pub(super) fn push(&mut self, device: DeviceIndex, place: usize) {
        self.lane(device).backlog.push_back(place);
        self.waiting_count += 1;
    }

    /// Returns the next operation for the kernel, counted as the kernel's from now on.
    pub(super) fn next_operation(&mut self) -> Option<usize> {
        if self.waiting_count == 0 {
            return None;
        }
        let part = self.part();
        for _ in 0..self.lanes.len() {
            let index = self.next % self.lanes.len();
            self.next = index + 1;
            if let Some(lane) = &mut self.lanes[index]
                && lane.kernel_count < part
                && let Some(place) = lane.backlog.pop_front()
            {
                lane.kernel_count += 1;
                self.kernel_count += 1;
                self.waiting_count -= 1;
                return Some(place);
            }
        }
        None
    }

    /// Counts an operation that the kernel has ended.
    pub(super) fn gave_back(&mut self, device: DeviceIndex) {
        self.lane(device).kernel_count -= 1;
        self.kernel_count -= 1;
    }

    /// Forgets the operations that wait.
    pub(super) fn clear(&mut self) {
        for lane in self.lanes.iter_mut().flatten() {
            lane.backlog.clear();
        }
        self.waiting_count = 0;
    }

    pub(super) fn waiting_count(&self) -> usize {
        self.waiting_count
    }

    /// Operations the kernel has.
    pub(super) fn kernel_count(&self) -> usize {
        self.kernel_count
    }

    /// Operations each device may have in the kernel.
    fn part(&self) -> usize {
        let device_count = self.lanes.iter().flatten().count();
        (self.room / device_count.max(1)).max(1)
    }

    fn lane(&mut self, device: DeviceIndex) -> &mut Lane {
        let lane = self.lanes[device.0 as usize].as_mut();
        lane.expect("the device was not removed")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DEAD: DeviceIndex = DeviceIndex(0);
    const GOOD: DeviceIndex = DeviceIndex(1);

    fn taken(backlog: &mut Backlog) -> Vec<usize> {
        std::iter::from_fn(|| backlog.next_operation()).collect()
    }

    #[test]
    fn a_device_that_answers_no_more_fills_its_own_part() {
        let mut backlog = Backlog::new(32);
        backlog.add();
        backlog.add();
        for place in 0..100 {
            backlog.push(DEAD, place);
        }
        assert_eq!(taken(&mut backlog), Vec::from_iter(0..16));
        for place in 200..220 {
            backlog.push(GOOD, place);
        }
        assert_eq!(taken(&mut backlog), Vec::from_iter(200..216));
        assert_eq!((backlog.kernel_count(), backlog.waiting_count()), (32, 88));
        backlog.gave_back(GOOD);
        assert_eq!(taken(&mut backlog), [216]);
    }

    #[test]
    fn devices_take_turns_and_what_comes_and_goes_shares_anew() {
        let mut backlog = Backlog::new(8);
        backlog.add();
        for place in 0..9 {
            backlog.push(DEAD, place);
        }
        backlog.add();
        for place in 10..13 {
            backlog.push(GOOD, place);
        }
        assert_eq!(taken(&mut backlog), [0, 10, 1, 11, 2, 12, 3]);
        for _ in 0..3 {
            backlog.gave_back(GOOD);
        }
        backlog.remove(GOOD);
        assert_eq!(taken(&mut backlog), [4, 5, 6, 7]);
        backlog.clear();
        backlog.gave_back(DEAD);
        assert_eq!(
            (backlog.next_operation(), backlog.waiting_count()),
            (None, 0)
        );
        assert_eq!(backlog.kernel_count(), 7);
    }

    #[test]
    fn each_has_room_for_one_where_the_kernel_has_less_than_devices() {
        let mut backlog = Backlog::new(1);
        for device in 0..3 {
            backlog.add();
            backlog.push(DeviceIndex(device), device as usize);
        }
        assert_eq!(taken(&mut backlog), [0, 1, 2]);
    }
}
