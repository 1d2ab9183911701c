;;;; Publish and subscribe: one publisher, up to 64 subscribers.

(in-package #:pelton)

(define-handle subscriber
    (;; A cons of the address of the C handle of the set that it is in; 0: none.
     (home (list 0) :type cons))
  "Receives the messages of a publisher: OPEN-SUBSCRIBER. One thread at a time uses it."
  :parent taker)

(defun make-subscriber (&key spins address)
  (let ((home (list 0)))
    (%make-subscriber :spins spins :address address :home home
                      :shut (lambda (address)
                              (let ((set (shiftf (car home) 0)))
                                (unless (zerop set) (%subscriber-set-remove set address)))
                              (shut address)))))

(define-figures publisher)
(define-figures subscriber
  (let ((set (car (subscriber-home handle))))
    (if (zerop set)
        (%subscriber-get-info (handle-address handle) sap)
        (%subscriber-set-get-info set (handle-address handle) sap))))
(define-resume subscriber)

;;; ---- Opening

(defun open-publisher (name &key wait capacity message-bytes-max history hold-max timeout uids mode)
  "Opens the publisher of a broadcast.

NAME: \"prices\" or \"unix:PATH\" publishes to the processes that subscribe under it; NIL to threads of this process
alone. \"path:DIR\" publishes in this directory, which keeps the lane: it creates the broadcast, or continues after the
last message of the publisher before, with the sizes that the broadcast has.
:HISTORY messages kept for subscribers that join later, as far as they fit into half the capacity.
:HOLD-MAX seconds that one subscriber may hold the publisher up at one message: one that could do so for longer is
refused, and with 0 each must lag. On a path the limit stays until the next publisher begins.
:TIMEOUT, on a path: seconds to wait while another publisher is alive; NIL is 200 ms, which the kernel may take to end a
process. :MODE, on a path: the permissions of a new directory, #o700.
:WAIT, :CAPACITY, :MESSAGE-BYTES-MAX, :UIDS as of OPEN-SENDER.

It admits subscribers, and notices their ends, within its own calls: one that sends does that if 10 ms have passed since
the last time. One that sends rarely calls ADMIT when its descriptor is readable. Closing it: its subscribers receive
what the lane has for them, then the end. Signals IN-USE-ERROR, NAME-ERROR, OPTION-ERROR; on a path ROLE-TAKEN-ERROR,
REFUSED-ERROR for a subscription that may hold it up for longer than :HOLD-MAX, also one that no process uses,
NOT-A-CHANNEL-ERROR, NO-SPACE-ERROR, REBOOTED-ERROR and others."
  (let ((deadline (and timeout (deadline-of timeout)))
        (hold-max-ns (and hold-max (if (zerop hold-max) +no-hold+ (seconds-to-ns hold-max)))))
    (loop
      ;; In slices, so that interrupts are served.
      (let* ((deadline-ns (and deadline (max 1 (slice-until deadline))))
             (opened (with-options (options publisher-options wait capacity message-bytes-max history hold-max-ns
                                            deadline-ns uids mode)
                       (opening (out %make-publisher :spins (eq wait :spin)) (%publisher-open name options out)))))
        (unless (and (typep opened '(or role-taken-error refused-error)) deadline (not (past-p deadline)))
          (return (check opened)))
        ;; An interrupt that is pending runs here: a macro opens without interrupts.
        (with-interrupts nil)))))

(defun durable-name (durable)
  "DURABLE as C gets it. It refuses one with a space; with a zero it would get a shorter one."
  (and durable (substitute #\Space (code-char 0) durable)))

(defun open-subscriber (name &key timeout policy lag-after slack start-from durable wait capacity message-bytes-max
                               uids mode)
  "Opens a subscriber of a broadcast.

NAME: \"prices\" or \"unix:PATH\" subscribes to the publisher under it. A PUBLISHER of this process: the subscriber is
for a thread, and has joined already. \"path:DIR\" subscribes in this directory, with or without a publisher.
:TIMEOUT seconds to wait for the publisher; on a path for the directory, and for a durable name that another process
uses. NIL does not wait, on a path 200 ms for the name.
:POLICY, what the publisher does when this subscriber falls behind. :GATE, the default: it waits; with :LAG-AFTER for so
many seconds at one message, then the subscriber lags until it has caught up. :LAG: it goes on, and the subscriber
misses messages, which are counted; :SLACK is by how many bytes it may be behind before, 256 KiB. :LATEST: the
subscriber receives the newest message only.
:START-FROM, the first message: NIL is the next one, a number so many before that one, :OLDEST the oldest.
:DURABLE, on a path: the subscription keeps its place under this name, over restarts of both sides; :START-FROM is for
its first subscriber alone. While no process uses the name it counts by its policy: :GATE holds the publisher up once
the lane is full, until the subscriber returns, or REMOVE-SUBSCRIPTION. Not with :LATEST.
:MODE, on a path: the permissions that the directory may have, #o700. :CAPACITY and :MESSAGE-BYTES-MAX are the largest
that it accepts. :WAIT, :UIDS as of OPEN-SENDER.

Interrupts are served while it waits. Closing it leaves the broadcast. Signals TIMED-OUT with the restart WAIT-LONGER,
NO-LISTENER-ERROR, REFUSED-ERROR and others; on a path NO-CHANNEL-ERROR, ROLE-TAKEN-ERROR."
  (let ((policy (ecase policy ((nil :gate) +gate+) (:lag +lag+) (:latest +latest+)))
        (lag-after-ns (and lag-after (max 1 (seconds-to-ns lag-after))))
        (start-from (if (eq start-from :oldest) +oldest+ start-from))
        (spins (eq wait :spin)))
    (with-path (durable (durable-name durable))
      (if (typep name 'publisher)
          (check (with-options (options subscriber-options wait policy lag-after-ns slack start-from durable capacity
                                        message-bytes-max uids mode)
                   (opening (out make-subscriber :spins spins)
                     (%publisher-subscriber (handle-address name) options out))))
          (opening-in-steps (subscriber name timeout make-subscriber :spins spins)
                            (options subscriber-options wait policy lag-after-ns slack start-from durable capacity
                                     message-bytes-max uids mode))))))

(defun remove-subscription (name durable)
  "Removes the durable subscription DURABLE of the broadcast NAME, \"path:DIR\", which no process uses: it holds the
publisher up no more. Waits for at most 200 ms, while another process opens or removes one there; then it signals
TIMED-OUT. Signals REFUSED-ERROR if there is none of the name, ROLE-TAKEN-ERROR while a process uses it, NAME-ERROR,
NO-CHANNEL-ERROR, NOT-A-CHANNEL-ERROR."
  (check-library)
  (check (attempt (%subscription-remove name (durable-name durable))))
  (values))

(defmacro with-publisher ((publisher name &rest options) &body body)
  "Runs BODY with the publisher that OPEN-PUBLISHER returns, and closes it however BODY is left."
  `(with-handle (,publisher (open-publisher ,name ,@options)) ,@body))

(defmacro with-subscriber ((subscriber name &rest options) &body body)
  "Runs BODY with the subscriber that OPEN-SUBSCRIBER returns, and closes it however BODY is left."
  `(with-handle (,subscriber (open-subscriber ,name ,@options)) ,@body))

;;; ---- Publishing

(defun publish (publisher octets &key (start 0) end timeout)
  "Sends the bytes of OCTETS from START to END to all subscribers as one message, which is copied once, into the lane.
Waits while a subscriber that gates has not released the space, up to TIMEOUT seconds. Returns true. The end of a
subscriber is no error. Signals TIMED-OUT, TOO-LARGE-ERROR; then nothing was sent. Restarts: WAIT-LONGER; DROP-MESSAGE,
which returns NIL."
  (declare (type publisher publisher))
  (let ((handle (handle-address publisher)))
    (with-octets-at (sap size) (octets start end)
      (let ((tried (briefly (%publisher-send handle sap size +no-wait+))))
        (or (eql tried +ok+)
            (and (persisting (:what "send")
                   (attempt-waiting (publisher handle timeout deadline :spins (handle-spins publisher) :size size
                                                                       :tried tried)
                     (%publisher-send handle sap size deadline)))
                 t))))))

(defun try-publish (publisher octets &key (start 0) end)
  "As PUBLISH, but never waits: returns NIL if there is no space, and has sent nothing."
  (declare (type publisher publisher))
  (with-octets-at (sap size) (octets start end)
    (eql (check (attempt (%publisher-send (handle-address publisher) sap size +no-wait+))) +ok+)))

(defun wait-subscribers (publisher count &key timeout)
  "Admits subscribers, and lets go those that have ended. Waits up to TIMEOUT seconds until there are COUNT; an
interrupt is served within 50 ms. Returns PUBLISHER. Signals TIMED-OUT with the restart WAIT-LONGER."
  (declare (type publisher publisher) (type (unsigned-byte 32) count))
  (persisting ()
    (attempt-waiting (nil nil timeout deadline)
      (%publisher-wait-subscribers (handle-address publisher) count deadline)))
  publisher)

(defun admit (publisher)
  "Admits subscribers, and lets go those that have ended. Does not wait. For a publisher that has nothing to send."
  (wait-subscribers publisher 0 :timeout 0))

(defconstant +subscribers-max+ 64)

(defun subscribers (publisher)
  "Returns the subscribers that have joined, and how far each is behind: a list of property lists with the fields of
pelton_subscriber_state, as :PID, :BEHIND, :MISSED, :HOLDS-NS. :POLICY is a keyword, :LAGS a boolean, and :DURABLE a
name or NIL; a durable one that no process uses has the :PID 0. Does not wait or admit."
  (declare (type publisher publisher))
  (let ((states (make-octets (* +subscribers-max+ +sizeof-subscriber-state+))))
    (with-pinned-objects (states)
      (with-words (count 1)
        (check (attempt (%publisher-subscribers (handle-address publisher) (vector-sap states) +subscribers-max+ count)))
        (loop for i below (sap-ref-64 count 0)
              for sap = (sap+ (vector-sap states) (* i +sizeof-subscriber-state+))
              for at = (+ (* i +sizeof-subscriber-state+) (- (sap-int (subscriber-state.durable sap)) (sap-int sap)))
              for name = (map 'string #'code-char (subseq states at (position 0 states :start at)))
              collect (list :pid (subscriber-state.pid sap) :uid (subscriber-state.uid sap)
                            :durable (and (plusp (length name)) name)
                            :policy (nth (subscriber-state.policy sap) '(:gate :lag :latest))
                            :lags (eql 1 (subscriber-state.lags sap))
                            :lag-after-ns (subscriber-state.lag-after-ns sap)
                            :holds-ns (subscriber-state.holds-ns sap)
                            :behind (subscriber-state.behind sap)
                            :messages (subscriber-state.messages sap)
                            :missed (subscriber-state.missed sap)))))))

;;; ---- Receiving

(define-next-slowly next-delivery-slowly subscriber)

(defmacro with-delivery-at ((at sap size number missed) &body body)
  "Runs BODY with the parts of the delivery at AT; NUMBER and MISSED may be NIL."
  `(let ((,sap (int-sap (delivery.data (int-sap ,at))))
         (,size (ldb (byte 62 0) (delivery.size (int-sap ,at))))
         ,@(when number `((,number (delivery.number (int-sap ,at)))))
         ,@(when missed `((,missed (delivery.missed (int-sap ,at))))))
     (declare (ignorable ,sap ,size))
     ,@body))

(defun delivery-or-end (subscriber timeout end-p)
  "As RECEIVE-DELIVERY; with END-P, NIL once the publisher has closed."
  (receiving (at tried delivered subscriber subscriber)
    (when (or (eql tried +ok+) (next-delivery-slowly subscriber at timeout end-p tried))
      (with-delivery-at (at sap size number missed)
        (let ((octets (sap-octets sap size)))
          (setf delivered t)
          (values octets number missed))))))

(defun receive-delivery (subscriber &key timeout)
  "Receives the next message, a fresh vector of its bytes. Waits up to TIMEOUT seconds; interrupts are served. The other
values are its number, and how many messages the subscriber has missed directly before it. Each publisher counts its
messages from 1; on a path it continues its predecessor's count. Signals TIMED-OUT with the restart WAIT-LONGER;
CLOSED-ERROR after the last message; PEER-DIED-ERROR with the restart RESUME-CHANNEL, which waits for the publisher's
successor; TOO-SMALL-ERROR if the heap has no space: the message remains."
  (delivery-or-end subscriber timeout nil))

(defun try-receive-delivery (subscriber)
  "As RECEIVE-DELIVERY, but never waits: returns NIL if there is no message."
  (receiving (at tried delivered subscriber subscriber)
    (cond ((eql tried +ok+)
           (with-delivery-at (at sap size number missed)
             (let ((octets (sap-octets sap size)))
               (setf delivered t)
               (values octets number missed))))
          (t
           (check (or (shiftf (handle-unsignalled subscriber) nil) tried))
           nil))))

(defmacro with-delivery (((sap size &key number missed) subscriber &key timeout) &body body)
  "Receives the next message and runs BODY with SAP at its SIZE bytes, aligned to 8 in the lane of a subscriber that
gates, else a copy. It is released however BODY is left, and must not be read afterwards: until then a durable
subscriber that is killed receives it again. NUMBER and MISSED are variables for the values of RECEIVE-DELIVERY. Waits
up to TIMEOUT seconds. Returns the values of BODY. Conditions as RECEIVE-DELIVERY."
  (let ((at (gensym "AT")) (tried (gensym "TRIED")) (delivered (gensym "DELIVERED")) (from (gensym "SUBSCRIBER")))
    `(let ((,from ,subscriber))
       (receiving (,at ,tried ,delivered ,from subscriber)
         (unless (eql ,tried +ok+) (next-delivery-slowly ,from ,at ,timeout nil ,tried))
         (setf ,delivered t)
         (with-delivery-at (,at ,sap ,size ,number ,missed) ,@body)))))

(defmacro do-deliveries ((octets subscriber &key number missed timeout result) &body body)
  "Runs BODY with OCTETS bound to each message, a fresh vector, until the publisher has closed; then returns RESULT. The
message is released before BODY runs. NUMBER and MISSED are variables for the values of RECEIVE-DELIVERY. Waits up to
TIMEOUT seconds for each. BODY is in a block named NIL. Conditions as RECEIVE-DELIVERY."
  (let ((from (gensym "SUBSCRIBER")) (seconds (gensym "TIMEOUT")) (number (or number (gensym)))
        (missed (or missed (gensym))))
    `(let ((,from ,subscriber) (,seconds ,timeout))
       (loop
         (multiple-value-bind (,octets ,number ,missed) (delivery-or-end ,from ,seconds t)
           (declare (ignorable ,number ,missed))
           (unless ,octets (return ,result))
           ,@body)))))
