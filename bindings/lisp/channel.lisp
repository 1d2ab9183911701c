;;;; Channels: a sender, a receiver, and what is made of many.

(in-package #:pelton)

(define-handle sender ()
  "What messages are sent by. One thread at a time uses it.")

(define-handle receiver (;; What was received, and not shown, since an interrupt has unwound: the four words that describe it.
                         (unseen '() :type list))
  "What messages are received by. One thread at a time uses it.")

(define-handle senders ()
  "What any thread may send by at any time: each has a lane of its own, made when it first sends, given up when the thread ends.")

(define-handle listener ()
  "What takes in who connects.")

;;; ---- Making them

(defun open-end (name options timeout make open)
  "What MAKE makes of what OPEN, one of the library's functions, opens under NAME. Waits up to TIMEOUT seconds for it to be there, nil: not."
  (let ((spins (eq (getf options :wait) :spin)))
    (persisting ()
      (let ((deadline (if timeout (deadline-of timeout) +no-wait+)))
        (loop
          ;; Waits for nobody to come, but up to 5 seconds for who is slow to shake hands.
          (let ((made (with-options (sap options)
                        (opening (out funcall make :spins spins) (funcall open name sap out)))))
            (unless (and (or (eql made +again+) (typep made '(or no-listener-error no-channel-error)))
                         (not (past-p deadline)))
              (return made)))
          ;; Nothing tells when somebody listens.
          (with-interrupts (sleep 0.005)))))))

(defconstant +hands-ns+ 500000000 "So long who has connected may take to shake hands, beyond the deadline.")

(defun open-listener (name options)
  (check (with-options (sap options)
           (opening (out %make-listener) (%listen name sap out)))))

(defun accept-end (name options timeout make accept)
  "Listens under NAME, waits up to TIMEOUT seconds, nil for ever, and is what MAKE makes of what ACCEPT, one of the library's functions, has."
  (without-interrupts
    (let ((listener (allow-with-interrupts (open-listener name options))) (spins (eq (getf options :wait) :spin)))
      ;; Interrupts are looked at while nobody has come. From then on WITH-HANDLE is to have what is made.
      (unwind-protect
           (allow-with-interrupts
             (persisting ()
               (loop with deadline = (deadline-of timeout)
                     do (with-interrupts (wait-readable (descriptor listener) deadline))
                        (let ((made (opening (out funcall make :spins spins)
                                      (funcall accept (handle-address listener)
                                               ;; Who hears an interrupt, and finds nobody there, does not wait in the library.
                                               (if (readable-p (descriptor listener))
                                                   (slice-until (if (eql deadline +forever+) deadline (+ deadline +hands-ns+))
                                                                (* 10 +hands-ns+))
                                                   +no-wait+)
                                               out))))
                          (unless (and (eql made +again+) (not (past-p deadline)))
                            (return made))))))
        (close-quietly listener)))))

(defun without-keys (options &rest keys)
  (loop for (key value) on options by #'cddr
        unless (member key keys) append (list key value)))

(defun open-sender (name &rest options &key accept timeout &allow-other-keys)
  "The sending end of a channel.
NAME  \"events\": connects to the receiver that listens under this short name; \"unix:PATH\": at this socket;
      \"path:DIR\": opens the channel in this directory, and goes on behind the last message of the sender before.
:ACCEPT true: listens under the name instead, and waits for a receiver to connect.
:TIMEOUT seconds. Waits so long for somebody to listen, or for the channel to be made, nil: not; with :ACCEPT for who connects, nil: for ever.
:WAIT :BLOCK, spins for some microseconds, then sleeps; or :SPIN, never sleeps.
:CAPACITY bytes of the lane, 64 MiB; :MESSAGE-BYTES-MAX; :UIDS, a list of users that may be at the other end besides this process's own;
of a path :CREATE true, which makes the channel, :MODE #o700, and :LANES 1, how many senders there may be.
Shaking hands with who is slow takes up to 5 seconds without interrupts. Signals TIMED-OUT with the restart WAIT-LONGER; NO-LISTENER-ERROR,
NO-CHANNEL-ERROR, ROLE-TAKEN-ERROR, REFUSED-ERROR, NAME-ERROR, OPTION-ERROR and others, whose text says what to do."
  (let ((options (without-keys options :accept :timeout)))
    (if accept
        (accept-end name options timeout #'%make-sender #'%accept-sender)
        (open-end name options timeout #'%make-sender #'%sender-open))))

(defun open-receiver (name &rest options &key accept gather timeout &allow-other-keys)
  "The receiving end of a channel: as OPEN-SENDER; of a path it begins with the oldest message that was not released.
:GATHER true: takes in all senders that connect under NAME, up to :LANES 1024, each with a lane of its own, and threads of this process by
OPEN-SENDERS; NAME may be nil for these alone. It does not wait. :ANNOUNCE true has it tell of their coming and going."
  (let ((options (without-keys options :accept :gather :timeout)))
    (cond (gather
           (check (with-options (sap options)
                    (opening (out %make-receiver :spins (eq (getf options :wait) :spin)) (%gather name sap out)))))
          (accept (accept-end name options timeout #'%make-receiver #'%accept-receiver))
          (t (open-end name options timeout #'%make-receiver #'%receiver-open)))))

(defun make-channel (&rest options)
  "A channel between threads of this process: its sender and its receiver. Of the options :WAIT, :CAPACITY and :MESSAGE-BYTES-MAX. Does not
wait. Signals OPTION-ERROR, SYSTEM-ERROR."
  (let ((spins (eq (getf options :wait) :spin)))
    (check-library)
    (with-options (sap options)
      (with-words (out 2)
        (multiple-value-bind (sender receiver)
            (without-interrupts
              (let ((result (attempt (%threads sap out (sap+ out 8)))))
                (if (eql result 0)
                    (values (adopt (%make-sender :address (sap-ref-64 out 0) :spins spins))
                            (adopt (%make-receiver :address (sap-ref-64 out 8) :spins spins)))
                    result)))
          (values (check sender) receiver))))))

(defun open-senders (receiver)
  "What threads of this process send by, to a receiver that was opened with :GATHER. Any thread may use it at any time, with SEND. Without a
name make it before receiving. Signals REFUSED-ERROR of another receiver."
  (declare (type receiver receiver))
  (check (opening (out %make-senders) (%receiver-senders (handle-address receiver) out))))

(defmacro with-channel ((sender receiver &rest options) &body body)
  "Runs BODY with both ends of a channel between threads: MAKE-CHANNEL. They are closed however BODY is left; threads that use them must have
ended by then."
  (let ((given (gensym "OPTIONS")))
    `(let ((,given (list ,@options)))
       (without-interrupts
         (multiple-value-bind (,sender ,receiver) (allow-with-interrupts (apply #'make-channel ,given))
           (unwind-protect (with-local-interrupts ,@body)
             (close-quietly ,sender)
             (close-quietly ,receiver)))))))

(defmacro with-sender ((sender name &rest options) &body body)
  "Runs BODY with the sending end of a channel: OPEN-SENDER. It is closed however BODY is left."
  `(with-handle (,sender (open-sender ,name ,@options)) ,@body))

(defmacro with-receiver ((receiver name &rest options) &body body)
  "Runs BODY with the receiving end of a channel: OPEN-RECEIVER. It is closed however BODY is left."
  `(with-handle (,receiver (open-receiver ,name ,@options)) ,@body))

(defmacro with-senders ((senders receiver) &body body)
  "Runs BODY with what threads send by: OPEN-SENDERS. It is closed however BODY is left; threads that use it must have ended by then."
  `(with-handle (,senders (open-senders ,receiver)) ,@body))

;;; ---- Sending

(defun send-slowly (sender address size timeout tried)
  "As SEND, of SIZE bytes at ADDRESS; true, or nil by DROP-MESSAGE. TRIED is what was answered already."
  (declare (type handle sender) (type word address) (type (unsigned-byte 62) size))
  (let ((handle (handle-address sender)))
    (and (persisting (:handle (and (typep sender 'sender) sender) :what "send")
           (etypecase sender
             (sender (attempt-waiting (handle (handle-spins sender) timeout deadline
                                       :arm (%arm-send handle size) :tried tried :handle sender)
                       (%send handle (int-sap address) size deadline)))
             ;; What the caller alone leads to must not be found forgotten meanwhile.
             (senders (with-pinned-objects (sender)
                        (attempt-waiting (handle nil timeout deadline :arm nil :tried tried)
                          (%senders-send handle (int-sap address) size deadline))))))
         t)))

(declaim (inline try-send-sap send-sap))
(defun try-send-sap (sender sap size)
  "As ATTEMPT."
  (declare (type handle sender) (type system-area-pointer sap) (type (unsigned-byte 62) size))
  (let ((handle (handle-address sender)))
    (if (typep sender 'senders)
        (attempt (%senders-send handle sap size +no-wait+))
        (briefly (%send handle sap size +no-wait+)))))

(defun send-sap (sender sap size &optional timeout)
  "As SEND, of SIZE bytes at SAP."
  (let ((tried (try-send-sap sender sap size)))
    (or (eql tried 0)
        (send-slowly sender (sap-int sap) size timeout tried))))

(declaim (inline send))
(defun send (sender octets &key (start 0) end timeout)
  "Sends the bytes of OCTETS from START to END, nil for its end, as a message: copied once, into the lane. SENDER is a SENDER, or SENDERS,
which any thread may use. Waits for room, up to TIMEOUT seconds, nil for ever; of SENDERS interrupts are looked at 20 times a second. Answers true.
Signals TIMED-OUT, TOO-LARGE-ERROR, and a CHANNEL-ENDED once the receiver is gone; nothing was sent then. Restarts: WAIT-LONGER; DROP-MESSAGE,
which answers nil; of PEER-DIED-ERROR RESUME-CHANNEL, which waits for a successor, and sends to that."
  (with-octets-at (sap size) (octets start end)
    (send-sap sender sap size timeout)))

(defun try-send (sender octets &key (start 0) end)
  "As SEND, but never waits: nil if there is no room; then nothing was sent."
  (with-octets-at (sap size) (octets start end)
    (eql (check (try-send-sap sender sap size)) 0)))

(defun send-batch (sender messages &key timeout)
  "Sends a list of messages, vectors of bytes, which appear to the receiver at once or not at all. They are put together first, which copies them
once more: this is for small ones. Waits for room for all of them, up to TIMEOUT seconds, nil for ever. Answers true. Signals as SEND."
  (declare (type sender sender))
  (let* ((count (length messages)) (handle (handle-address sender)) (at 0)
         (octets (make-octets (loop for message in messages sum (length (the (vector (unsigned-byte 8)) message)))))
         (places (make-array (* 2 count) :element-type 'word)))
    (with-pinned-objects (octets places)
      (loop for message in messages for place from 0 by 2
            do (replace octets message :start1 at)
               (setf (aref places place) (+ (sap-int (vector-sap octets)) at)
                     (aref places (1+ place)) (length message))
               (incf at (length message)))
      (let ((sap (vector-sap places)))
        (and (persisting (:handle sender :what "send")
               ;; A batch may need more room than a message may have.
               (attempt-waiting (handle (handle-spins sender) timeout deadline :handle sender :arm nil)
                 (%send-batch handle sap count deadline)))
             t)))))

(defun send-descriptors (sender octets descriptors &key (start 0) end timeout)
  "As SEND, together with a list of file descriptors, at most 64, which stay the caller's too. Not on a path. Signals as SEND;
TOO-MANY-DESCRIPTORS-ERROR, REFUSED-ERROR on a path, SYSTEM-ERROR of one that is not open."
  (declare (type sender sender))
  (let ((handle (handle-address sender)) (fds (coerce descriptors '(simple-array (signed-byte 32) (*)))))
    (with-octets-at (sap size) (octets start end)
      (with-pinned-objects (fds)
        (and (persisting (:handle sender :what "send")
               (attempt-waiting (handle (handle-spins sender) timeout deadline :arm (%arm-send handle size) :handle sender)
                 (%send-descriptors handle sap size (vector-sap fds) (length fds) deadline)))
             t)))))

(defun trim (sender)
  "Gives memory that holds no message back to the system, after a burst. A system call or two."
  (declare (type sender sender))
  (with-pinned-objects (sender)
    (check (attempt (%trim (handle-address sender)))))
  (values))

;;; ---- Reserving

(defun reserve (writer size at timeout tried)
  "Room for SIZE bytes by WRITER, whose place is written to AT; nil by DROP-MESSAGE. TRIED is what was answered already."
  (declare (type handle writer) (type (unsigned-byte 62) size at))
  (let ((address (handle-address writer)) (sender (and (typep writer 'sender) writer)))
    (persisting (:handle sender :what (if sender "send" "append"))
      (if sender
          (attempt-waiting (address (handle-spins writer) timeout deadline :arm (%arm-send address size) :tried tried :handle sender)
            (%reserve address size deadline (int-sap at)))
          (with-cause (if (typep tried 'condition) (shiftf tried nil) (attempt (%reserve address size +no-wait+ (int-sap at)))) writer)))))

(defun reserved-already ()
  (error 'reserved-error
         :code +reserved+
         :detail "a WITH-RESERVED of this sender, or of this thread's appender, is open: only its body may write there"))

(declaim (inline commit))
(defun commit (address size at)
  "Makes a message of what was reserved, and takes it from AT."
  (declare (type word address) (type (unsigned-byte 62) size at))
  (let ((result (without-interrupts
                  (let ((result (attempt (%commit address size))))
                    (when (eql result 0) (setf (word-at at 0) 0))
                    result))))
    (unless (eql result 0) (check result))))

(defmacro with-reserved (((sap size) handle bytes &key timeout) &body body)
  "Reserves BYTES bytes of shared memory, runs BODY with the SAP of them, aligned to 8, and makes them a message when BODY ends normally. It is
the first SIZE bytes, a variable that begins as BYTES and that BODY may set to less. However else BODY is left, nothing is seen of it. HANDLE
is a SENDER, or APPENDERS; meanwhile nothing else is done with that sender, or with those appenders by this thread, not by an interrupt either:
RESERVED-ERROR. Waits for room as SEND, up to TIMEOUT seconds, or as APPEND-MESSAGE. Answers what BODY does. Signals, with restarts, as those;
after DROP-MESSAGE BODY is not run, and the answer is nil."
  (let ((at (gensym "AT")) (writer (gensym "WRITER")) (wanted (gensym "BYTES")) (tried (gensym "TRIED")) (first (gensym "FIRST")))
    `(let ((,writer (writer-of ,handle)) (,wanted ,bytes) (,tried nil) (,first nil))
       (declare (type (unsigned-byte 62) ,wanted))
       (when ,writer
         (guarding (,at 1)
             (unless (handle-reserved (the handle ,writer))
               (setf (handle-reserved ,writer) t
                     ,first t
                     ,tried (attempt (%reserve (handle-address ,writer) ,wanted +no-wait+ (int-sap ,at)))))
             (progn
               (unless ,first (reserved-already))
               (when (or (eql ,tried 0) (reserve ,writer ,wanted ,at ,timeout ,tried))
                 (let ((,sap (sap-at ,at 0)) (,size ,wanted))
                   (declare (type (unsigned-byte 62) ,size) (ignorable ,sap))
                   (multiple-value-prog1 (progn ,@body)
                     (commit (handle-address ,writer) ,size ,at)))))
           (when ,first
             (unless (zerop (word-at ,at 0))
               (attempt (%abort (handle-address ,writer))))
             (setf (handle-reserved ,writer) nil)))))))

;;; ---- Receiving

(defun next-message-slowly (receiver at timeout end-p tried)
  (declare (type receiver receiver) (type (unsigned-byte 62) at))
  (let ((handle (handle-address receiver)))
    (persisting (:handle receiver)
      (let ((result (attempt-waiting (handle (handle-spins receiver) timeout deadline :tried tried :handle receiver)
                      (%receive handle deadline (int-sap at)))))
        (if (and end-p (typep result 'closed-error))
            (return-from next-message-slowly nil)
            result)))
    t))

(declaim (inline next-message))
(defun next-message (receiver at timeout end-p tried)
  "Describes the next message AT. Waits. True, or, if END-P, nil at the end of the channel. TRIED is as of RECEIVING."
  (declare (type receiver receiver) (type (unsigned-byte 62) at))
  (or (eql tried 0)
      (next-message-slowly receiver at timeout end-p tried)))

(defun look-again (receiver at)
  "Describes AT what was received and not shown. Answers 0."
  (declare (type receiver receiver) (type (unsigned-byte 62) at))
  (loop for word in (shiftf (receiver-unseen receiver) '()) for offset from 0 by 8 do (setf (word-at at offset) word))
  0)

(defun keep-unseen (receiver at)
  "What is described AT is to be shown to who receives next."
  (declare (type receiver receiver) (type (unsigned-byte 62) at))
  (setf (receiver-unseen receiver) (loop for offset from 0 below 32 by 8 collect (word-at at offset))))

(defmacro receiving ((at tried shown receiver) &body body)
  "Runs BODY where AT is to describe a message, as it does already if TRIED, what was answered when one was looked for, is 0. However BODY is left,
the message is released if SHOWN was set, which BODY does before anybody looks at it; else it is kept for who receives next."
  `(let ((,tried nil) (,shown nil))
     (guarding (,at 4)
         (if (receiver-unseen (the receiver ,receiver))
             (setf ,tried (look-again ,receiver ,at))
             (unless (typep (setf ,tried (attempt (%receive (handle-address ,receiver) +no-wait+ (int-sap ,at)))) 'fixnum)
               (setf ,tried (note ,receiver ,tried))))
         (progn ,@body)
       (unless (zerop (word-at ,at 0))
         (if ,shown
             (attempt (%release (handle-address ,receiver)))
             (keep-unseen ,receiver ,at))))))

(defun message-flags (flags)
  (loop for (bit word) in '((1 :redelivered) (2 :joined) (4 :left) (8 :died) (16 :broke-rules))
        when (logtest bit flags) collect word))

(defmacro with-message-at ((at sap size seq lane flags) &body body)
  "Runs BODY with what is described AT."
  `(let (,@(when sap `((,sap (sap-at ,at 0)) (,size (ldb (byte 62 0) (word-at ,at 8)))))
         ,@(when seq `((,seq (ldb (byte 32 0) (word-at ,at 16)))))
         ,@(when lane `((,lane (ldb (byte 32 32) (word-at ,at 16)))))
         ,@(when flags `((,flags (message-flags (ldb (byte 32 0) (word-at ,at 24)))))))
     ,@(when sap `((declare (ignorable ,sap ,size))))
     ,@body))

(defmacro with-received (((sap size &key seq lane flags) receiver &key timeout) &body body)
  "Receives the next message, and runs BODY with its SIZE bytes in place, at SAP, aligned to 8; then it is released, however BODY is left. It
must not be looked at afterwards. Who reads in place trusts the sender not to write after it has committed: copy once, by SAP-OCTETS, who does
not. Waits up to TIMEOUT seconds, nil for ever. SEQ, LANE and FLAGS are variables for what RECEIVE answers by these names.
Signals as RECEIVE."
  (let ((at (gensym "AT")) (tried (gensym "TRIED")) (shown (gensym "SHOWN")) (from (gensym "RECEIVER")))
    `(let ((,from ,receiver))
       (receiving (,at ,tried ,shown ,from)
         (next-message ,from ,at ,timeout nil ,tried)
         (setf ,shown t)
         (with-message-at (,at ,sap ,size ,seq ,lane ,flags) ,@body)))))

(defmacro do-received (((sap size &key seq lane flags) receiver &key timeout result) &body body)
  "As WITH-RECEIVED, of each message until the sender has closed: then answers RESULT. In a block named nil."
  (let ((at (gensym "AT")) (tried (gensym "TRIED")) (shown (gensym "SHOWN")) (from (gensym "RECEIVER")) (seconds (gensym "TIMEOUT")))
    `(let ((,from ,receiver) (,seconds ,timeout))
       (loop
         (receiving (,at ,tried ,shown ,from)
           (cond ((next-message ,from ,at ,seconds t ,tried)
                  (setf ,shown t)
                  (with-message-at (,at ,sap ,size ,seq ,lane ,flags) ,@body))
                 (t (return ,result))))))))

(defmacro do-messages ((octets receiver &key seq lane flags timeout result) &body body)
  "Runs BODY with each message, a fresh vector of its bytes, which is released before, until the sender has closed: then answers RESULT. In a
block named nil. Waits up to TIMEOUT seconds for each, nil for ever. Signals as RECEIVE."
  (let ((message (gensym "MESSAGE")) (from (gensym "RECEIVER")) (seconds (gensym "TIMEOUT")))
    (let ((seq (or seq (gensym))) (lane (or lane (gensym))) (flags (or flags (gensym))))
      `(let ((,from ,receiver) (,seconds ,timeout))
         (loop
           (multiple-value-bind (,octets ,message ,seq ,lane ,flags) (receive-or-end ,from ,seconds)
             (declare (ignorable ,octets ,seq ,lane ,flags))
             (unless ,message (return ,result))
             ,@body))))))

(defun receive-or-end (receiver timeout &optional (end-p t))
  (receiving (at tried shown receiver)
    (when (next-message receiver at timeout end-p tried)
      (with-message-at (at sap size seq lane flags)
        (let ((octets (sap-octets sap size)))
          (setf shown t)
          (values octets t seq lane flags))))))

(defun receive (receiver &key timeout)
  "The next message, a fresh vector of its bytes. Waits for it up to TIMEOUT seconds, nil for ever. The other values are its number in its
lane; which of several senders' lanes it came by, 0 where there is one; and a list of what else is known: :REDELIVERED, if a receiver before
this one may have seen it; or, instead of a message, :JOINED, :LEFT, :DIED or :BROKE-RULES, if that was asked for by :ANNOUNCE.
Signals TIMED-OUT with the restart WAIT-LONGER; CLOSED-ERROR after the last message; PEER-DIED-ERROR with the restart RESUME-CHANNEL, which
waits for a successor of the sender, and goes on with what that sends; TOO-SMALL-ERROR of a message that the heap has no room for, which stays."
  (multiple-value-bind (octets received-p seq lane flags) (receive-or-end receiver timeout nil)
    (declare (ignore received-p))
    (values octets seq lane flags)))

(defun try-receive (receiver)
  "As RECEIVE, but never waits: nil if nothing is there."
  (receiving (at tried shown receiver)
    (cond ((eql tried 0)
           (with-message-at (at sap size seq lane flags)
             (let ((octets (sap-octets sap size)))
               (setf shown t)
               (values octets seq lane flags))))
          (t
           (check (or (shiftf (handle-untold receiver) nil) tried))
           nil))))

(defun receive-into (receiver buffer &key (start 0) end timeout)
  "Copies the next message into BUFFER, from START on, and answers how many bytes it has. Safe against any sender. Waits as RECEIVE. Signals as
RECEIVE, and TOO-SMALL-ERROR when it has more than END, nil for the buffer's, minus START: then it is still to be received."
  (declare (type receiver receiver))
  (with-octets-at (sap room) (buffer start end)
    (with-words (size 1)
      (let ((tried (if (receiver-unseen receiver)
                       nil
                       (attempt (%receive-copy (handle-address receiver) sap room +no-wait+ size)))))
        (cond ((eql tried 0) (sap-ref-64 size 0))
              ((typep tried 'too-small-error) (error tried))
              (t
               (note receiver tried)
               (receive-into-slowly receiver (sap-int sap) room timeout)))))))

(defun receive-into-slowly (receiver address room timeout)
  (declare (type receiver receiver) (type word address) (type (unsigned-byte 62) room))
  ;; Without what tells of senders, as the library's own.
  (loop
    (receiving (at tried shown receiver)
      (next-message receiver at timeout nil tried)
      (with-message-at (at sap size nil nil flags)
        (cond ((intersection flags '(:joined :left :died :broke-rules))
               (setf shown t))
              ((> size room)
               (error 'too-small-error :code +too-small+
                                       :detail (format nil "the message has ~d bytes, and there is room for ~d: it stays" size room)))
              (t
               (sb-kernel:system-area-ub8-copy sap 0 (int-sap address) 0 size)
               (setf shown t)
               (return size)))))))

(defun receive-batch (receiver &key (count 64) timeout)
  "A list of the next messages, fresh vectors of their bytes: those that are there, up to COUNT. Waits for the first as RECEIVE, and signals
as that. An interrupt that unwinds takes with it what was copied by then: where that matters, DO-RECEIVED."
  (declare (type receiver receiver) (type (integer 1 #.most-positive-fixnum) count))
  (cons (receive receiver :timeout timeout)
        (loop repeat (1- count)
              for octets = (handler-case (try-receive receiver)
                             ;; For the next time.
                             (pelton-error (condition) (note receiver condition) nil))
              while octets collect octets)))

(defun take-descriptors (receiver)
  "The file descriptors that came with the message that WITH-RECEIVED or DO-RECEIVED shows, a list: in their bodies, once. They are the caller's
to close. What is not taken is closed when the body is left. Of a message that comes again after a sender's or receiver's death it waits for them for up to a
second. Signals DESCRIPTORS-LOST-ERROR, if this process has no room for all of them, CORRUPT-ERROR, SYSTEM-ERROR: then they are gone."
  (declare (type receiver receiver))
  (with-words (fds 32)
    (with-words (count 1)
      (let ((result (without-interrupts
                      (let ((result (attempt (%take-descriptors (handle-address receiver) fds 64 count))))
                        (if (eql result 0)
                            (loop for i below (sap-ref-64 count 0) collect (sap-ref-32 fds (* 4 i)))
                            result)))))
        (check result)))))

;;; ---- Holding

(define-handle held ((sap (int-sap 0) :type system-area-pointer :read-only t)
                     (size 0 :type (unsigned-byte 62) :read-only t))
  "A message that is kept in place: its HELD-SIZE bytes are at HELD-SAP until CLOSE-HANDLE, which releases it.")

(defun receive-held (receiver &key timeout)
  "The next message, in place, as a HELD, which the receiver goes on without. It is released by CLOSE-HANDLE: in any order, by any thread, at any
time. One that is held long keeps the room of those behind it, too. The other values, waiting, and signals are as of RECEIVE."
  (receiving (at tried shown receiver)
    (next-message receiver at timeout nil tried)
    (with-message-at (at sap size seq lane flags)
      (values (check (opening (out %make-held :sap sap :size size)
                       (let ((held (%hold (handle-address receiver) out)))
                         ;; It is not to be released then.
                         (when (eql held 0) (setf (word-at at 0) 0))
                         held)))
              seq lane flags))))
