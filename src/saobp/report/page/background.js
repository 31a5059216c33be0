/** Long work in short slices, so that the page answers in between; new work replaces old. */

const SLICE_MS = 12;

/** Runs one generator at a time. */
export class Background {
  constructor() {
    /** @type {(() => boolean) | null} one slice of the work; whether there is more */
    this.slice = null;
    this.isDue = false;
    this.channel = new MessageChannel();
    this.channel.port1.onmessage = () => {
      this.isDue = false;
      if (this.slice !== null && this.slice()) this.schedule();
    };
  }

  /** Drop whatever is under way. */
  stop() {
    this.slice = null;
  }

  /**
   * @template T
   * @param {Generator<void, T, void>} work
   * @param {(result: T) => void} then
   */
  run(work, then) {
    this.slice = () => {
      const end = performance.now() + SLICE_MS;
      do {
        const { done, value } = work.next();
        if (done) {
          this.slice = null;
          then(value);
          return this.slice !== null;
        }
      } while (performance.now() < end);
      return true;
    };
    this.schedule();
  }

  schedule() {
    if (this.isDue) return;
    this.isDue = true;
    this.channel.port2.postMessage(null);
  }
}
