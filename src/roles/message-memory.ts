import { setFlagsFromString } from 'node:v8';

/**
 * Lets V8 collect the messages of calls while they are young. It watches which lines of code make objects that live on, and
 * makes theirs in the old generation from then on; a busy store has it take those that decode messages for such lines, where
 * a message lives for a millisecond. The old generation then fills five times as fast as it has to (measured over the
 * socket: 4.5 MB instead of 0.9 MB between two young collections), and collecting that one is what makes calls wait.
 */
export function keepMessagesYoung(): void {
  setFlagsFromString('--no-allocation-site-pretenuring');
}
