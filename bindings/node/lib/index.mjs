// The same objects for `import`: there is one copy of the addon and of its classes.
import pelton from './index.js';

export const {
  Client, Failed, Listener, PeltonError, Publisher, Receiver, RecordFile, RecordReader, Sender, Service, Subscriber,
  gather, listen, publish, removeSubscription, setLog, threads,
} = pelton;
export default pelton;
