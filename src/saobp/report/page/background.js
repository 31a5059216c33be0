/** Long computations in short slices, so that the page stays responsive; a new one replaces the old. */

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

  /** Cancel the current generator. */
  stop() {
    this.slice = null;
  }

  /** @param {Generator<void, void, void>} work */
  run(work) {
    this.slice = () => {
      const end = performance.now() + SLICE_MS;
      while (performance.now() < end) if (work.next().done) return false;
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
