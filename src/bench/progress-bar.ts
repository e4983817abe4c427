/** Shows how many of a known number are done. */
export interface ProgressBar {
  /** One more is done. */
  step(failed: boolean): void;
  /** Ends the display. */
  end(): void;
}

/** Where a bar is drawn. */
export interface BarOptions {
  /** A terminal gets a bar that moves; anything else a line for each tenth. */
  readonly terminal: boolean;
  readonly total: number;
  write(text: string): void;
}

const CLEAR = '\r\u001b[K';
const WIDTH = 30;
const REDRAW_MS = 100;

/** Makes a bar; nothing of it keeps the process alive. */
export function createBar({ terminal, total, write }: BarOptions): ProgressBar {
  const startMs = performance.now();
  let done = 0;
  let failed = 0;
  let drawnMs = 0;
  let told = 0;
  const seconds = () => ((performance.now() - startMs) / 1000).toFixed(1);
  const text = () => `${done} of ${total} requests, ${failed} failed, ${seconds()} s`;
  const draw = () => {
    const full = Math.floor((done / total) * WIDTH);
    write(`${CLEAR}[${'#'.repeat(full)}${'.'.repeat(WIDTH - full)}] ${text()}`);
  };
  if (terminal) draw();
  return {
    step(isFailed) {
      done += 1;
      if (isFailed) failed += 1;
      const now = performance.now();
      if (terminal && now - drawnMs >= REDRAW_MS) {
        drawnMs = now;
        draw();
      }
      const tenth = Math.floor((done * 10) / total);
      if (!terminal && tenth > told) {
        told = tenth;
        write(`${text()}\n`);
      }
    },
    end() {
      if (!terminal) return;
      draw();
      write('\n');
    },
  };
}
