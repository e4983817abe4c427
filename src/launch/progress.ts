/** Shows how a launch goes on. */
export interface Progress {
  /** Writes a line that stays. */
  line(text: string): void;
  /** Names what is waited for; none ends the display. */
  waitFor(names: readonly string[]): void;
}

/** Where a display writes to. */
export interface ProgressOptions {
  /** A terminal gets a line that moves while something is waited for; anything else only lines that stay. */
  readonly terminal: boolean;
  write(text: string): void;
}

const FRAMES = ['⠋', '⠙', '⠹', '⠸', '⠼', '⠴', '⠦', '⠧', '⠇', '⠏'];
const FRAME_MS = 120;
const CLEAR = '\r\u001b[K';

/** Makes a display; nothing of it keeps the process alive. */
export function createProgress({ terminal, write }: ProgressOptions): Progress {
  let waiting: readonly string[] = [];
  let since = performance.now();
  let timer: NodeJS.Timeout | undefined;
  let frame = 0;
  const draw = (): void => {
    if (waiting.length === 0) return;
    const seconds = Math.floor((performance.now() - since) / 1000);
    write(`${CLEAR}${FRAMES[frame++ % FRAMES.length]} waiting for ${waiting.join(', ')} (${seconds} s)`);
  };
  const clear = (): void => {
    if (terminal && waiting.length > 0) write(CLEAR);
  };
  return {
    line(text) {
      clear();
      write(`${text}\n`);
      if (terminal) draw();
    },
    waitFor(names) {
      if (!terminal) return;
      clear();
      if (waiting.length === 0) since = performance.now();
      waiting = names;
      clearInterval(timer);
      if (names.length === 0) return;
      draw();
      timer = setInterval(draw, FRAME_MS);
      timer.unref();
    },
  };
}
