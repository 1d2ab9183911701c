'use strict';
// pelton: messages at memory speed between the threads and processes of one Linux machine. README.md

const { Publisher, Subscriber, publish, removeSubscription } = require('./broadcast.js');
const { Listener, Receiver, Sender, gather, listen, threads } = require('./channel.js');
const { Client } = require('./client.js');
const { Failed, PeltonError } = require('./errors.js');
const { setLog } = require('./log.js');
const { RecordFile, RecordReader } = require('./records.js');
const { Service } = require('./service.js');

module.exports = {
  Client, Failed, Listener, PeltonError, Publisher, Receiver, RecordFile, RecordReader, Sender, Service, Subscriber,
  gather, listen, publish, removeSubscription, setLog, threads,
};
